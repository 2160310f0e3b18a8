"""Links as ``muster check`` measured them, read from the check.json of its run folder."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.plan.hardware.model import Link


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a check says of links; None where it measured none of that kind."""

    within: Link | None
    between: Link | None


def read(path: Path, *, cards_per_machine: int, network_is_shared: bool) -> Measured:
    """Return the slowest links, since a ring is as fast as its slowest. Raises ``ValueError`` in words."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        ranks = {one["rank"]: one for one in document["ranks"]}
        pairs = [
            (one["host"] == ranks[pair["peer"]]["host"], pair)
            for one in ranks.values()
            for pair in one.get("pairs", ())
            if pair["peer"] in ranks
        ]
        machines = [
            {"bytes_per_s": one["bytes_per_s"], "latency_s": (one["round_trip_s"] or 0.0) / 2}
            for one in document["links"]
        ]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no check.json of muster check") from error
    source = f"measured by muster check ({path})"
    within = _slowest((pair for near, pair in pairs if near), 1, source)
    # Two ranks at a time have the whole network; in training a machine's cards share it, unless each has its own.
    share = cards_per_machine if network_is_shared else 1
    between = _slowest((pair for near, pair in pairs if not near), share, source)
    # Between machines without their cards, one network was measured, whatever others there are.
    return Measured(within=within, between=between or _slowest(machines, cards_per_machine, source))


def _slowest(pairs: Iterable[Mapping[str, Any]], share: int, source: str) -> Link | None:
    measured = [one for one in pairs if one.get("bytes_per_s")]
    if not measured:
        return None
    return Link(
        latency_s=max(one.get("latency_s") or 0.0 for one in measured),
        bytes_s=min(one["bytes_per_s"] for one in measured) / share,
        source=source,
    )
