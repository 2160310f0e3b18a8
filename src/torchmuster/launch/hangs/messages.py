"""Texts about a hang: which rank, doing what, where, for how long, who waits, and how to fix it."""

from collections.abc import Mapping

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.flight_recorder import FIX_NETWORK, FIX_ORDER, FIX_SHAPES
from torchmuster.launch.hangs.observation import Hang, HangKind, Observation
from torchmuster.units import format_seconds, rank_text

NAMES: Mapping[HangKind, str] = {
    HangKind.STOPPED: "rank-stopped",
    HangKind.EXITED: "rank-exited",
    HangKind.ELSEWHERE: "rank-elsewhere",
    HangKind.DIFFERENT: "collectives-differ",
    HangKind.ALL_WAIT: "collective-does-not-end",
}
_GROUPS_SHOWN = 3
_WHY_ORDER = (
    "collectives are matched per group, in the order in which each rank calls them: one rank called something that others "
    "did not, or ran more or fewer steps"
)


def hang_finding(
    hang: Hang, devices: Mapping[int, str], details: Mapping[int, str] | None = None
) -> Finding:
    """Return the finding that reports a hang; ``details`` are more facts about ranks that cause it, by rank."""
    match hang.kind:
        case HangKind.DIFFERENT:
            what, why, fix = _different_calls(hang)
        case HangKind.ALL_WAIT:
            what, why, fix = _all_wait(hang)
        case _:
            what = _culprits_text(hang, devices, details or {})
            why, fix = _reason_and_fix(hang)
    return Finding(
        name=NAMES[hang.kind],
        status=Status.WARNING,
        what=what,
        why=why,
        fix=fix,
    )


def hang_over_finding(hang: Hang, now_s: float) -> Finding:
    """Return the finding that reports the end of a hang."""
    duration = format_seconds(hang.waited_s + max(0.0, now_s - hang.now_s))
    what = f"the ranks continue after a hang of {duration}"
    if hang.has_culprit:
        culprits = rank_text([rank.rank for rank in hang.culprits])
        what += f", in which they waited for {culprits}"
    return Finding(name="hang-over", status=Status.NOTE, what=what)


def _culprits_text(hang: Hang, devices: Mapping[int, str], details: Mapping[int, str]) -> str:
    """Return ``rank 3 on b keeps the others waiting: in time.sleep …; ranks 0-2 wait in all_reduce``."""
    parts = []
    for culprit in hang.culprits[:_GROUPS_SHOWN]:
        parts.append(f"{_name(culprit, devices)} {_what_it_does(culprit, hang)}")
        if culprit.rank in details:
            parts.append(details[culprit.rank])
    rest = [culprit.rank for culprit in hang.culprits[_GROUPS_SHOWN:]]
    if rest:
        parts.append(f"{rank_text(rest)} too")
    if hang.waiting:
        parts.append(_waiting_text(hang))
    return "; ".join(parts)


def _what_it_does(culprit: Observation, hang: Hang) -> str:
    where = _where(culprit)
    last_seen = f", last seen{where}" if where else ""
    if hang.kind is HangKind.STOPPED:
        return f"has been stopped for {hang.duration(hang.waited_s)}{last_seen}"
    if hang.kind is HangKind.EXITED:
        return "has exited, and keeps the others waiting"
    seconds = hang.now_s - culprit.still_since_s
    if culprit.is_at_work(hang.now_s):
        seconds = hang.waited_s
    elif culprit.is_silent:  # the place is that of its last beat
        where = last_seen
    doing = f"in {culprit.heartbeat.doing or 'its own code'} for {hang.duration(seconds)}"
    return f"keeps the others waiting: {doing}{where}"


def _reason_and_fix(hang: Hang) -> tuple[str, str]:
    """Return why the first culprit keeps the others waiting, and what to do about it."""
    culprit = hang.culprits[0]
    heartbeat, host = culprit.heartbeat, culprit.host
    if hang.kind is HangKind.STOPPED:
        return (
            "its process was stopped by a signal (SIGSTOP, SIGTSTP) or by a debugger; it does nothing until it is resumed",
            f"on {host}: kill -CONT {heartbeat.pid}   # after finding out what stopped it",
        )
    if hang.kind is HangKind.EXITED:
        return (
            "its process exited while the others still need it: it ran fewer steps, or exited early",
            "give every rank the same number of batches (a DistributedSampler, drop_last=True), and finish with a barrier",
        )
    if culprit.is_in_kernel(hang.now_s):
        return (
            "its process waits in the kernel (state D): for a disk, a network file system or a driver",
            "find out what it waits for, often a network mount that does not respond; "
            f"on {host}: cat /proc/{heartbeat.pid}/stack; dmesg",
        )
    if culprit.is_at_work(hang.now_s):
        return (
            "it is busy, and the others are idle until it arrives; it may be slow, or in an endless loop",
            "if only one rank does this work, let the others wait with torchmuster.train.world.rank_zero_first(), "
            "or do it before the run",
        )
    if culprit.is_silent:
        return (
            "it is in native code that does not release the GIL, and uses no CPU: it waits for something there",
            "its stacks show the call; look for locks held by threads at a fork, and for files or sockets that do not respond",
        )
    fix = f"see {heartbeat.place or 'its stacks'}: find out what only this rank waits for there"
    if heartbeat.doing.startswith("DataLoader") or heartbeat.phase == "loading data":
        fix = (
            f"check what the loader reads on {host}: a disk, a download or a worker that does not respond; "
            "DataLoader(timeout=60) turns such a wait into an error"
        )
    return (
        "its process uses no CPU: it sleeps, or waits for something that is not a collective",
        fix,
    )


def _different_calls(hang: Hang) -> tuple[str, str, str]:
    ranks_of: dict[str, list[int]] = {}
    for rank in hang.culprits:
        call = _call(rank)
        if rank.heartbeat.waits and not hang.is_hopeless:
            call += f", number {rank.heartbeat.waits[0].number}"
        ranks_of.setdefault(f"{call}{_where(rank)}", []).append(rank.rank)
    parts = []
    for call, ranks in list(ranks_of.items())[:_GROUPS_SHOWN]:
        parts.append(f"{rank_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {call}")
    calls = "; ".join(parts)
    if not hang.is_hopeless:
        waited = hang.duration(hang.waited_s)
        what = f"all ranks have waited for {waited}, but not in the same collective: {calls}"
        return what, _WHY_ORDER, FIX_ORDER
    what = f"the ranks called different collectives and wait for each other forever: {calls}"
    if len({_operation(rank) for rank in hang.culprits}) == 1:
        number = hang.culprits[0].heartbeat.waits[0].number
        why = "tensors of different shapes or dtypes cannot be combined"
        return what, f"all called collective number {number} of their group; {why}", FIX_SHAPES
    return what, _WHY_ORDER, FIX_ORDER


def _all_wait(hang: Hang) -> tuple[str, str, str]:
    waited, first = hang.duration(hang.waited_s), hang.culprits[0]
    if hang.unseen:
        unseen = f"one or more of {rank_text(hang.unseen)}, which were not looked at"
        return (
            f"{_waiting_text(hang)} for {waited}{_where(first)}, for {unseen}",
            "all ranks on these hosts have called the collective",
            "muster hang --hosts …   # all hosts of the job",
        )
    why = "no rank is missing: the collective is slow, or data between the ranks does not arrive"
    if not hang.from_stacks and not first.heartbeat.waits:
        why = "torch's flight recorders show none of their collectives, so it is not visible whether the ranks wait in the same one"
    return (
        f"all ranks have been in {_operation(first)} for {waited}, but it does not finish{_where(first)}",
        why,
        FIX_NETWORK,
    )


def _waiting_text(hang: Hang) -> str:
    """Return which ranks wait in what: ``ranks 0-2 wait in all_reduce``."""
    ranks_in: dict[str, list[int]] = {}
    for rank in hang.waiting:
        ranks_in.setdefault(_operation(rank), []).append(rank.rank)
    parts = []
    for operation, ranks in list(ranks_in.items())[:_GROUPS_SHOWN]:
        parts.append(f"{rank_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {operation}")
    return ", ".join(parts)


def _name(rank: Observation, devices: Mapping[int, str]) -> str:
    device = devices.get(rank.rank)
    name = f"rank {rank.rank} on {rank.host}"
    return f"{name} ({device})" if device else name


def _where(rank: Observation) -> str:
    """Return the rank's line in the user's code, its phase and step: `` at train.py:88 in step (forward, step 12)``."""
    heartbeat = rank.heartbeat
    parts = [heartbeat.phase] if heartbeat.phase else []
    if heartbeat.step is not None:
        parts.append(f"step {heartbeat.step}")
    place = f" at {heartbeat.place}" if heartbeat.place else ""
    return f"{place} ({', '.join(parts)})" if parts else place


def _operation(rank: Observation) -> str:
    """Return what a rank waits in: the name of the collective, if there is one."""
    if rank.heartbeat.waits:
        return rank.heartbeat.waits[0].operation
    return rank.heartbeat.doing or "a collective"


def _call(rank: Observation) -> str:
    """Return what a rank called: ``all_reduce of Float [1024]``."""
    waits = rank.heartbeat.waits
    return waits[0].text if waits else _operation(rank)
