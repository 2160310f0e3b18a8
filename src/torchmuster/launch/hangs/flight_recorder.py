"""Compare torch's flight recorders of several ranks: the first collective that differs between them.

Each rank's recorder keeps its last collectives, numbered within each group. The first one that differs may be long before
the one in which the ranks hang, which ``detector.py`` finds by their heartbeats. All backends write
the same fields.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.launch import torch_private
from torchmuster.launch.heartbeat import PendingCollective
from torchmuster.launch.rank.collectives import pending_collective
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


def can_be_same(calls: Collection[PendingCollective]) -> bool:
    """Return whether the calls of several ranks can be the same collective; unknown shapes fit."""
    operations = {call.operation for call in calls}
    inputs = {(call.shapes, call.dtype) for call in calls if call.shapes}
    return len(operations) == 1 and (len(inputs) <= 1 or not operations <= SAME_SHAPES)


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
    calls: dict[
        tuple[str, int], dict[int, PendingCollective]
    ] = {}  # by group and number, then by rank
    for rank in ranks:
        entries = dumps[rank].get("entries")
        for entry in entries if isinstance(entries, list) else ():
            call = _call_of(entry)
            if call is not None:
                calls.setdefault((call.group, call.number), {})[rank] = call
    findings: dict[str, Finding] = {}  # the first difference in each group
    for group, number in sorted(calls):
        by_rank = calls[group, number]
        if group not in findings and not can_be_same(by_rank.values()):
            findings[group] = _difference(number, by_rank)
    return list(findings.values())


def _not_visible(ranks: Sequence[int]) -> Finding:
    return Finding(
        name="collectives-not-visible",
        status=Status.NOTE,
        what=f"the flight recorders of {rank_text(ranks)} have no entries, so their collectives are not visible",
        why="the ranks use a backend that does not record, or the recorder is switched off",
        fix="TORCH_FR_BUFFER_SIZE=2000 muster run …   # 0 switches the recorder off",
    )


def _difference(number: int, calls: Mapping[int, PendingCollective]) -> Finding:
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
        what=f"collective number {number} differs between ranks: {'; '.join(parts)}",
        why=f"collectives are matched in the order in which each rank calls them; {why}",
        fix=fix,
        evidence=evidence,
    )


def _call_of(entry: object) -> PendingCollective | None:
    """Return the collective of an entry; None for point-to-point messages, which have no common number."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    try:
        call = pending_collective(str(entry["process_group"][0]), entry)
        return msgspec.convert(call, PendingCollective)
    except (LookupError, TypeError, AttributeError, msgspec.ValidationError):
        return None
