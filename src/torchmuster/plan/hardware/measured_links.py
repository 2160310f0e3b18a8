"""Links as they were measured: by ``muster check`` (check.json of its run folder) or ``muster bench collectives`` (record.json)."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.plan.hardware.model import Link


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement says of links; None where it was of none of that kind."""

    within: Link | None
    between: Link | None


def read(path: Path, *, cards_per_machine: int, network_is_shared: bool) -> Measured:
    """Return the slowest links, since a ring is as fast as its slowest. Raises ``ValueError`` in words."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        # Two ranks at a time have the whole network; in training a machine's cards share it, unless each has its own.
        share = cards_per_machine if network_is_shared else 1
        if "record" in document:
            return _of_bench(document["record"], share, f"measured by muster bench ({path})")
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
        raise ValueError(
            f"{path} is no check.json of muster check, nor a record.json of muster bench collectives"
        ) from error
    source = f"measured by muster check ({path})"
    within = _slowest((pair for near, pair in pairs if near), 1, source)
    between = _slowest((pair for near, pair in pairs if not near), share, source)
    # Between machines without their cards, one network was measured, whatever others there are.
    return Measured(within=within, between=between or _slowest(machines, cards_per_machine, source))


def _of_bench(record: Mapping[str, Any], share: int, source: str) -> Measured:
    """Return the link by which every rank sent to the next: the slowest of that ring."""
    line, near = (
        record["facts"]["lines"]["send-receive"],
        len(set(record["settings"]["hosts"])) == 1,
    )
    ring = {"bytes_per_s": line["bytes_s"], "latency_s": line["latency_s"]}
    link = _slowest([ring], 1 if near else share, source)
    return Measured(within=link if near else None, between=None if near else link)


def _slowest(pairs: Iterable[Mapping[str, Any]], share: int, source: str) -> Link | None:
    measured = [one for one in pairs if one.get("bytes_per_s")]
    if not measured:
        return None
    return Link(
        latency_s=max(one.get("latency_s") or 0.0 for one in measured),
        bytes_s=min(one["bytes_per_s"] for one in measured) / share,
        source=source,
    )
