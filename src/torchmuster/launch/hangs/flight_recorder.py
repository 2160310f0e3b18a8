"""Compare torch's flight recorders of several ranks: which ranks are behind, and which called something else.

Each rank's recorder keeps its last collectives, numbered within each group. Compared across ranks, the
numbers show which rank has not reached a collective that others wait in, and the first collective that differs
between ranks, which may be long before the one in which they hang. All backends write the same fields; gloo does not update ``state`` and does not record the
members of a group, so both are derived from other fields.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.launch import torch_private
from torchmuster.launch.launcher.console import rank_text
from torchmuster.units import plural

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
    is_done: bool

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


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """One group in one rank's recorder."""

    label: str  # for messages: " of the group tp", "" for the default group
    members: tuple[int, ...]  # () if the recorder does not know them
    calls: Mapping[int, RecordedCall]  # by number; the oldest may have been dropped

    @property
    def pending(self) -> RecordedCall | None:
        """The earliest unfinished collective."""
        for number in sorted(self.calls):
            if not self.calls[number].is_done:
                return self.calls[number]
        return None

    @property
    def last(self) -> RecordedCall:
        """The last collective that was called."""
        return self.calls[max(self.calls)]


Groups = Mapping[int, RecordedGroup]  # one group, by rank


def read_flight_record(text: str | bytes) -> dict[str, Any]:
    """Return a recorder's dump; an empty dict if the text is not one."""
    try:
        content = untrusted.parse_json(text)
    except untrusted.Unreadable:
        return {}
    return content if isinstance(content, dict) else {}


def groups_of(dump: Mapping[str, Any]) -> dict[str, RecordedGroup]:
    """Return the groups of a dump by name; unreadable entries are skipped."""
    calls: dict[str, dict[int, RecordedCall]] = {}
    labels: dict[str, str] = {}
    entries = dump.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        call = _call_of(entry) if isinstance(entry, dict) else None
        if call is None:
            continue
        # The name is the same on all ranks, the description may not be.
        name, description = _group_of(entry)
        calls.setdefault(name, {})[call.number] = call
        labels[name] = "" if name == DEFAULT_GROUP else f" of the group {description or name}"
    groups = {}
    for name, group_calls in calls.items():
        members = _members(dump, name)
        groups[name] = RecordedGroup(label=labels[name], members=members, calls=group_calls)
    return groups


def analyse_flight_records(dumps: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return findings from the dumps of several ranks, by rank; empty if nothing is wrong.

    Dumps without any collective are no sign of health: then the collectives are not visible.
    """
    if dumps and all(dump.get("entries") == [] for dump in dumps.values()):
        return [_not_visible(sorted(dumps))]
    by_group: dict[str, dict[int, RecordedGroup]] = {}
    for rank in sorted(dumps):
        for name, group in groups_of(dumps[rank]).items():
            by_group.setdefault(name, {})[rank] = group
    findings = []
    for name, known in by_group.items():
        finding = _different_calls(known) or _behind(known, _missing(name, known, sorted(dumps)))
        if finding is not None:
            findings.append(finding)
    return findings


def _missing(name: str, known: Groups, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that are members of a group but called nothing in it."""
    members: set[int] = set()
    for group in known.values():
        members.update(group.members)
    if not members and name == DEFAULT_GROUP:
        members.update(ranks)
    return [rank for rank in ranks if rank in members and rank not in known]


def _not_visible(ranks: Sequence[int]) -> Finding:
    return Finding(
        name="collectives-not-visible",
        status=Status.NOTE,
        what=f"the flight recorders of {rank_text(ranks)} have no entries, so their collectives are not visible",
        why="the ranks use a backend that does not record, or the recorder is switched off",
        fix="TORCH_FR_BUFFER_SIZE=2000 muster run …   # 0 switches the recorder off",
    )


def _different_calls(known: Groups) -> Finding | None:
    """Find the first collective that differs between ranks."""
    by_number: dict[int, dict[int, RecordedCall]] = {}
    for rank, group in known.items():
        for number, call in group.calls.items():
            by_number.setdefault(number, {})[rank] = call
    for number in sorted(by_number):
        calls = by_number[number]
        first = next(iter(calls.values()))
        if not all(first.fits(call) for call in calls.values()):
            return _difference(number, calls, _label(known))
    return None


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


def _behind(known: Groups, missing: Sequence[int]) -> Finding | None:
    """Find ranks that have not reached the collective that others wait in."""
    pending: dict[int, RecordedCall] = {}
    for rank, group in known.items():
        if group.pending is not None:
            pending[rank] = group.pending
    if not pending:
        return None
    awaited = min(pending.values(), key=lambda call: call.number)
    waiting = [rank for rank, call in pending.items() if call.number == awaited.number]
    late = []
    reasons = []
    for rank, group in known.items():
        last = group.last
        if last.number < awaited.number:
            late.append(rank)
            reasons.append(f"rank {rank} called {last.text} last, number {last.number}")
    del reasons[_CALLS_SHOWN:]
    label = _label(known)
    if missing:
        reasons.append(f"{rank_text(missing)} called none{label}")
    absent = sorted([*late, *missing])
    if not absent:
        return None
    return Finding(
        name="rank-behind",
        status=Status.FAILURE,
        what=f"{rank_text(absent)} did not reach {awaited.text}, number {awaited.number}{label}; waiting in it: "
        f"{rank_text(waiting)}",
        why="; ".join(reasons),
        fix="see the stacks for what they do instead",
    )


def _label(known: Groups) -> str:
    return next(iter(known.values())).label


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and description of an entry's group."""
    group = entry.get("process_group")
    parts = list(map(str, group)) if isinstance(group, list | tuple) else []
    if not parts:
        return str(entry.get("pg_id", "")), ""
    description = parts[1] if len(parts) > 1 else ""
    return parts[0], "" if description == "undefined" else description


def _call_of(entry: Mapping[str, Any]) -> RecordedCall | None:
    """Return the collective of an entry; None for point-to-point messages, which have no common number."""
    number, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if entry.get("is_p2p") or not isinstance(number, int) or not isinstance(name, str):
        return None
    dtypes = entry.get("input_dtypes")
    return RecordedCall(
        number=number,
        operation=name.partition(":")[2] or name,
        shapes=_shapes(entry.get("input_sizes")),
        dtypes=tuple(map(str, dtypes)) if isinstance(dtypes, list) else (),
        # Gloo only marks it as retired; NCCL may set the state before that.
        is_done=entry.get("retired") is True or entry.get("state") == "completed",
    )


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    shapes = []
    for shape in value if isinstance(value, list) else ():
        if isinstance(shape, list):
            shapes.append(_integers(shape))
    return tuple(shapes)


def _integers(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(value for value in values if isinstance(value, int))


def _members(dump: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ranks of a group, if the recorder knows them: as the text "[0, 1]"."""
    config = dump.get("pg_config")
    group = config.get(name) if isinstance(config, dict) else None
    ranks = group.get("ranks") if isinstance(group, dict) else None
    try:
        listed = untrusted.parse_json(ranks) if isinstance(ranks, str) else ranks
    except ValueError:
        return ()
    return _integers(listed) if isinstance(listed, list) else ()
