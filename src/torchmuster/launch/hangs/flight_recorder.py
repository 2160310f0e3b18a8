"""Compare torch's flight recorders of several ranks: which ranks are behind, and which called something else.

Each rank's recorder keeps its last collectives, numbered within each group. Compared across ranks, the
numbers show which rank has not reached a collective that others wait in, and the first collective that differs
between ranks. Gloo and NCCL write the same fields; gloo does not update ``state`` and does not record the
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

# These need tensors of the same shape on every rank; in others shapes may differ (gather, all_to_all).
SAME_SHAPES = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "allreduce_coalesced"}
    | {"all_reduce_coalesced", *torch_private.SAME_SHAPES}
)
_KINDS_SHOWN = 4
_SHAPES_SHOWN = 4
EVERYBODY = "0"  # the name of the default process group


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective as one rank called it."""

    seq: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool

    @property
    def words(self) -> str:
        """The call as text: ``all_reduce of Float [1024]``."""
        return call_text(self.op, self.shapes, self.dtypes)

    def fits(self, other: "RecordedCall") -> bool:
        """Return whether two ranks' calls can be the same collective."""
        if self.op != other.op:
            return False
        if self.op not in SAME_SHAPES:
            return True
        # Without shapes the call is unknown, and counts as matching.
        same_shapes = not self.shapes or not other.shapes or self.shapes == other.shapes
        same_types = not self.dtypes or not other.dtypes or self.dtypes == other.dtypes
        return same_shapes and same_types


def call_text(op: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Return a call as text: ``all_reduce of Float [1024]``."""
    if not shapes:
        return op
    sizes = ", ".join(str(list(shape)) for shape in shapes[:_SHAPES_SHOWN])
    more = f" and {len(shapes) - _SHAPES_SHOWN} more" if len(shapes) > _SHAPES_SHOWN else ""
    kind = f"{dtypes[0]} " if dtypes else ""
    return f"{op} of {kind}{sizes}{more}"


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """One group in one rank's recorder."""

    name: str
    called: str  # its description, for messages
    members: tuple[int, ...]  # () if the recorder does not know them
    calls: Mapping[int, RecordedCall]  # by number; the oldest may have been dropped

    @property
    def waits_in(self) -> RecordedCall | None:
        """The earliest unfinished collective."""
        return next(
            (self.calls[seq] for seq in sorted(self.calls) if not self.calls[seq].done), None
        )

    @property
    def last(self) -> RecordedCall | None:
        """The last collective that was called."""
        return self.calls[max(self.calls)] if self.calls else None


def read_flight_record(text: str | bytes) -> dict[str, Any]:
    """Return a recorder's dump; an empty dict if the text is not one."""
    try:
        content = untrusted.parse_json(text)
    except untrusted.Unreadable:
        return {}
    return content if isinstance(content, dict) else {}


def groups_of(dump: Mapping[str, Any]) -> dict[str, RecordedGroup]:
    """Return the groups of a dump; unreadable entries are skipped."""
    calls: dict[str, dict[int, RecordedCall]] = {}
    called: dict[str, str] = {}
    for entry in _entries(dump):
        name, description = _group_of(entry)
        call = _call_flight_recorder(entry)
        if call is not None:
            calls.setdefault(name, {})[call.seq] = call
            called[name] = description
    return {
        name: RecordedGroup(
            name=name, called=called[name], members=_members(dump, name), calls=some
        )
        for name, some in calls.items()
    }


def analyse_flight_records(dumps: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return findings from the dumps of several ranks, by rank; empty if nothing is wrong."""
    by_rank = {rank: groups_of(dump) for rank, dump in sorted(dumps.items())}
    names = dict.fromkeys(name for groups in by_rank.values() for name in groups)
    findings = []
    for name in names:
        known = {rank: groups[name] for rank, groups in by_rank.items() if name in groups}
        missing = [rank for rank in _expected(name, known, by_rank) if rank not in known]
        found = _not_alike(known) or _behind(known, missing) or _all_in_it(known)
        if found is not None:
            findings.append(found)
    return findings


def _expected(
    name: str,
    known: Mapping[int, RecordedGroup],
    by_rank: Mapping[int, Mapping[str, RecordedGroup]],
) -> Iterable[int]:
    """Return the ranks of a group that have a dump."""
    members = {rank for group in known.values() for rank in group.members}
    if not members and name == EVERYBODY:
        return by_rank
    return [rank for rank in by_rank if rank in members]


def _not_alike(known: Mapping[int, RecordedGroup]) -> Finding | None:
    """Find the first collective that differs between ranks."""
    for seq in sorted({seq for group in known.values() for seq in group.calls}):
        calls = {rank: group.calls[seq] for rank, group in known.items() if seq in group.calls}
        first = next(iter(calls.values()))
        if all(first.fits(call) for call in calls.values()):
            continue
        ways: dict[str, list[int]] = {}
        for rank, call in calls.items():
            ways.setdefault(call.words, []).append(rank)
        shown = "; ".join(
            f"{rank_text(ranks)} called {words}"
            for words, ranks in list(ways.items())[:_KINDS_SHOWN]
        )
        ops = {call.op for call in calls.values()}
        earlier = plural(seq - 1, "earlier collective")
        return Finding(
            name="collectives-differ" if len(ops) > 1 else "collective-shapes-differ",
            status=Status.FAILURE,
            what=f"collective number {seq}{_in(known)} differs between ranks: {shown}",
            why="collectives are matched in the order in which each rank calls them; "
            + (
                "from here on the ranks wait for each other forever"
                if len(ops) > 1
                else "tensors of different shapes or dtypes cannot be combined"
            ),
            fix=FIX_ORDER if len(ops) > 1 else FIX_SHAPES,
            evidence=f"{earlier} matched on all ranks" if seq > 1 else "",
        )
    return None


def _behind(known: Mapping[int, RecordedGroup], missing: Sequence[int]) -> Finding | None:
    """Find ranks that have not reached the collective that others wait in."""
    waiting = {rank: call for rank, group in known.items() if (call := group.waits_in)}
    if not waiting:
        return None
    earliest = min(waiting.values(), key=lambda call: call.seq)
    last = {rank: group.last for rank, group in known.items()}
    late = {rank: call for rank, call in last.items() if call and call.seq < earliest.seq}
    if not late and not missing:
        return None
    there = [rank for rank, call in waiting.items() if call.seq == earliest.seq]
    words = [
        f"{rank_text([rank])} called {call.words} last, number {call.seq}"
        for rank, call in list(late.items())[:_KINDS_SHOWN]
    ]
    words += [f"{rank_text(missing)} called none{_in(known)}"] if missing else []
    absent = sorted([*late, *missing])
    return Finding(
        name="rank-behind",
        status=Status.FAILURE,
        what=f"{rank_text(absent)} {_has(absent)} not reached {earliest.words}, number "
        f"{earliest.seq}{_in(known)}, in which {rank_text(there)} {_wait_flight_recorder(there)}",
        why="; ".join(words),
        fix="see the stacks for what they do instead",
    )


def _all_in_it(known: Mapping[int, RecordedGroup]) -> Finding | None:
    """Find a collective that all ranks have called and that does not finish on some."""
    waiting = {rank: call for rank, group in known.items() if (call := group.waits_in)}
    if not waiting:
        return None
    earliest = min(waiting.values(), key=lambda call: call.seq)
    stuck = [rank for rank, call in waiting.items() if call.seq == earliest.seq]
    everybody = "all ranks" if len(stuck) == len(known) else rank_text(stuck)
    return Finding(
        name="collective-does-not-end",
        status=Status.WARNING,
        what=f"all ranks have called {earliest.words}, number {earliest.seq}{_in(known)}, but it does not finish on "
        f"{everybody}",
        why="no rank is missing: the collective is slow, or data between the ranks does not arrive",
        fix=FIX_NETWORK,
    )


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


def _entries(dump: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    entries = dump.get("entries")
    return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and description; only the first is the same on all ranks."""
    parts = entry.get("process_group")
    words = [str(part) for part in parts] if isinstance(parts, list | tuple) else []
    name = words[0] if words else str(entry.get("pg_id", ""))
    described = words[1] if len(words) > 1 and words[1] not in ("", "undefined") else ""
    return name, described


def _call_flight_recorder(entry: Mapping[str, Any]) -> RecordedCall | None:
    """Return the collective of an entry; None for point-to-point messages, which have no common number."""
    seq, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if entry.get("is_p2p") or not isinstance(seq, int) or not isinstance(name, str):
        return None
    return RecordedCall(
        seq=seq,
        op=name.partition(":")[2] or name,
        shapes=_shapes(entry.get("input_sizes")),
        dtypes=_texts(entry.get("input_dtypes")),
        # Gloo only marks it as retired; NCCL may set the state before that.
        done=entry.get("retired") is True or entry.get("state") == "completed",
    )


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(
        tuple(n for n in one if isinstance(n, int)) for one in value if isinstance(one, list)
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _members(dump: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ranks of a group, if the recorder knows them: as the text "[0, 1]"."""
    config = dump.get("pg_config")
    about = config.get(name) if isinstance(config, dict) else None
    ranks = about.get("ranks") if isinstance(about, dict) else None
    try:
        listed = untrusted.parse_json(ranks) if isinstance(ranks, str) else ranks
    except ValueError:
        return ()
    return tuple(one for one in listed if isinstance(one, int)) if isinstance(listed, list) else ()


def _in(known: Mapping[int, RecordedGroup]) -> str:
    """Return the name of the group, unless it is the default group."""
    group = next(iter(known.values()))
    if group.name == EVERYBODY:
        return ""
    return f" of the group {group.called or group.name}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait_flight_recorder(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
