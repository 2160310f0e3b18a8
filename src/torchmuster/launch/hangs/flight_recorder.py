"""Compare torch's flight recorders of several ranks: the first collective that differs between them.

Each rank's recorder keeps its last collectives, numbered within each group. The first one that differs may be long before
the one in which the ranks hang, which ``detector.py`` finds by their heartbeats. All backends write
the same fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.launch import torch_private
from torchmuster.units import plural, rank_text

DEFAULT_GROUP = "0"  # the name of the default process group
FIX_ORDER = (
    "call the same collectives in the same order on every rank: none inside `if rank == 0`, and the same "
    "number of batches on every rank (a DistributedSampler, drop_last=True, or torch.distributed.algorithms.Join)"
)
FIX_SHAPES = (
    "use tensors of the same shape and dtype on all ranks: pad the last batch or drop it (drop_last=True), or gather the "
    "sizes first"
)
FIX_NETWORK = (
    "muster check --hosts …   # tests the connections between hosts, with small and large messages"
)
# These need tensors of the same shape on every rank; in others shapes may differ (gather, all_to_all).
SAME_SHAPES = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "allreduce_coalesced"}
    | {"all_reduce_coalesced", *torch_private.SAME_SHAPES}
)
_CALLS_SHOWN = 4
_SHAPES_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective as one rank called it, the ``number``-th of its group."""

    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The call as text: ``all_reduce of Float [1024]``."""
        if not self.shapes:
            return self.operation
        inputs = [str(list(shape)) for shape in self.shapes[:_SHAPES_SHOWN]]
        text = f"{self.operation} of {' '.join([*self.dtypes[:1], ', '.join(inputs)])}"
        if len(self.shapes) > _SHAPES_SHOWN:
            text += f" and {len(self.shapes) - _SHAPES_SHOWN} more"
        return text

    def fits(self, other: "RecordedCall") -> bool:
        """Return whether two ranks' calls can be the same collective; unknown shapes fit."""
        if self.operation != other.operation:
            return False
        if self.operation not in SAME_SHAPES:
            return True
        same_shapes = not self.shapes or not other.shapes or self.shapes == other.shapes
        same_dtypes = not self.dtypes or not other.dtypes or self.dtypes == other.dtypes
        return same_shapes and same_dtypes


def read_flight_record(text: str | bytes) -> dict[str, Any]:
    """Return a recorder's dump; an empty dict if the text is not one."""
    try:
        content = untrusted.parse_json(text)
    except untrusted.Unreadable:
        return {}
    return content if isinstance(content, dict) else {}


def analyse_flight_records(dumps: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return findings from the dumps of several ranks, by rank; empty if nothing is wrong.

    Dumps without any collective are no sign of health: then the collectives are not visible.
    """
    ranks = sorted(dumps)
    if dumps and all(dump.get("entries") == [] for dump in dumps.values()):
        return [_not_visible(ranks)]
    groups: dict[str, dict[int, dict[int, RecordedCall]]] = {}  # by number, then by rank
    labels: dict[str, str] = {}
    for rank in ranks:
        entries = dumps[rank].get("entries")
        for entry in entries if isinstance(entries, list) else ():
            call = _call_of(entry)
            if call is None:
                continue
            # The name is the same on all ranks, the description may not be.
            name, description = _group_of(entry)
            labels[name] = "" if name == DEFAULT_GROUP else f" of the group {description or name}"
            groups.setdefault(name, {}).setdefault(call.number, {})[rank] = call
    findings = []
    for name, by_number in groups.items():
        for number in sorted(by_number):
            calls = by_number[number]
            first = next(iter(calls.values()))
            if not all(first.fits(call) for call in calls.values()):
                findings.append(_difference(number, calls, labels[name]))
                break
    return findings


def _not_visible(ranks: Sequence[int]) -> Finding:
    return Finding(
        name="collectives-not-visible",
        status=Status.NOTE,
        what=f"the flight recorders of {rank_text(ranks)} have no entries, so their collectives are not visible",
        why="the ranks use a backend that does not record, or the recorder is switched off",
        fix="TORCH_FR_BUFFER_SIZE=2000 muster run …   # 0 switches the recorder off",
    )


def _difference(number: int, calls: Mapping[int, RecordedCall], label: str) -> Finding:
    ranks_of: dict[str, list[int]] = {}
    operations: set[str] = set()
    for rank, call in calls.items():
        ranks_of.setdefault(call.text, []).append(rank)
        operations.add(call.operation)
    parts = []
    for text, ranks in list(ranks_of.items())[:_CALLS_SHOWN]:
        parts.append(f"{rank_text(ranks)} called {text}")
    why = "tensors of different shapes or dtypes cannot be combined"
    fix = FIX_SHAPES
    if len(operations) > 1:
        why, fix = "from here on the ranks wait for each other forever", FIX_ORDER
    evidence = ""
    if number > 1:
        evidence = f"{plural(number - 1, 'earlier collective')} matched on all ranks"
    return Finding(
        name="collectives-differ",
        status=Status.FAILURE,
        what=f"collective number {number}{label} differs between ranks: {'; '.join(parts)}",
        why=f"collectives are matched in the order in which each rank calls them; {why}",
        fix=fix,
        evidence=evidence,
    )


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and description of an entry's group."""
    group = entry.get("process_group")
    parts = list(map(str, group)) if isinstance(group, list | tuple) else []
    if not parts:
        return str(entry.get("pg_id", "")), ""
    description = parts[1] if len(parts) > 1 else ""
    return parts[0], "" if description == "undefined" else description


def _call_of(entry: object) -> RecordedCall | None:
    """Return the collective of an entry; None for point-to-point messages, which have no common number."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    number, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if not isinstance(number, int) or not isinstance(name, str):
        return None
    dtypes = entry.get("input_dtypes")
    return RecordedCall(
        number=number,
        operation=name.partition(":")[2] or name,
        shapes=_shapes(entry.get("input_sizes")),
        dtypes=tuple(map(str, dtypes)) if isinstance(dtypes, list) else (),
    )


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    shapes = []
    for shape in value if isinstance(value, list) else ():
        if isinstance(shape, list):
            shapes.append(tuple(size for size in shape if isinstance(size, int)))
    return tuple(shapes)
