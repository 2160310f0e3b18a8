"""Messages about a hang: which rank, doing what, where, for how long, who waits, and how to fix it."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.flight_recorder import FIX_NETWORK, FIX_ORDER, FIX_SHAPES
from torchmuster.launch.hangs.hang_types import ALL_WAIT, Hang, HangKind, ObservedRank
from torchmuster.launch.launcher.console import rank_text
from torchmuster.units import format_seconds

_RANKS_SHOWN = 8
_CULPRITS_SHOWN = 3
_LOADER = "DataLoader"

# Finding names, by what the rank that keeps the others waiting is doing.
KEEPS_WAITING = {
    HangKind.ENDED: "rank-exited",
    HangKind.NATIVE: "rank-blocked-in-native-code",
    HangKind.DISK: "rank-blocked-on-io",
    HangKind.ASLEEP: "rank-idle",
    HangKind.AT_WORK: "rank-busy",
}
NAMES = frozenset(
    {"rank-stopped", "collectives-differ", "collective-shapes-differ", "collectives-out-of-step"}
    | {"collective-does-not-end", "ranks-not-seen", *KEEPS_WAITING.values()}
)

_WHY = {
    HangKind.STOPPED: "its process was stopped by a signal (SIGSTOP, SIGTSTP) or by a debugger; it does nothing until it is "
    "resumed",
    HangKind.ENDED: "its process exited while the others still need it: it ran fewer steps, or exited early",
    HangKind.NATIVE: "it is in native code that does not release the GIL, and uses no CPU: it waits for something there",
    HangKind.DISK: "its process waits in the kernel (state D): for a disk, a network file system or a driver",
    HangKind.ASLEEP: "its process uses no CPU: it sleeps, or waits for something that is not a collective",
    HangKind.AT_WORK: "it is busy, and the others are idle until it arrives; it may be slow, or in an endless loop",
}
_FIX = {
    HangKind.ENDED: "give every rank the same number of batches (a DistributedSampler, drop_last=True), and finish with a barrier",
    HangKind.NATIVE: "its stacks show the call; look for locks held by threads at a fork, and for files or sockets that do not "
    "respond",
    HangKind.DISK: "find out what it waits for, often a network mount that does not respond; on {host}: "
    "cat /proc/{pid}/stack; dmesg",
    HangKind.AT_WORK: "if only one rank does this work, let the others wait with torchmuster.train.world.rank_zero_first(), or do "
    "it before the run",
}


def hang_finding(hang: Hang, devices: Mapping[int, str]) -> Finding:
    """Return the finding that reports a hang."""
    kind = hang.kind
    if kind is HangKind.DIFFERENT:
        return _of_different(hang, devices)
    if kind is HangKind.UNSEEN:
        return _of_unseen(hang, devices)
    if kind in (HangKind.UNEQUAL, HangKind.TOGETHER):
        return _of_all_waiting(hang, devices)
    first = hang.culprits[0]
    told = [_doing(one, hang, devices) for one in hang.culprits[:_CULPRITS_SHOWN]]
    if len(hang.culprits) > _CULPRITS_SHOWN:
        rest = hang.culprits[_CULPRITS_SHOWN:]
        told.append(f"{rank_text(one.rank for one in rest)} too")
    waiting = f"; {_waiting_words(hang.waiting)}" if hang.waiting else ""
    return Finding(
        name="rank-stopped" if kind is HangKind.STOPPED else KEEPS_WAITING[kind],
        status=Status.WARNING,
        what="; ".join(told) + waiting,
        why=_WHY[kind],
        fix=_fix_messages(kind, first),
        evidence=_messages_evidence(hang, devices),
    )


def hang_continues_finding(told: Finding) -> Finding:
    """Return the finding for a known hang that continues: which rank and for how long."""
    return dataclasses.replace(told, why="", fix="", evidence="")


def hang_over_finding(hang: Hang, now_s: float, *, ended: Collection[int] = ()) -> Finding:
    """Return the finding that reports the end of a hang; ``ended`` are ranks that have exited."""
    took = format_seconds(hang.waited_s + max(0.0, now_s - hang.now_s))
    who = rank_text(one.rank for one in hang.culprits)
    if hang.kind in ALL_WAIT:
        who = "the ranks"
    elif any(one.rank in ended for one in hang.culprits):
        left = [one.rank for one in hang.waiting if one.rank not in ended]
        who = rank_text(left) if left else "the ranks"
    verb = "continues" if who.startswith("rank ") else "continue"
    return Finding(
        name="hang-over", status=Status.NOTE, what=f"{who} {verb} after a hang of {took}"
    )


def _doing(one: ObservedRank, hang: Hang, devices: Mapping[int, str]) -> str:
    who = _who(one, devices)
    match hang.kind:
        case HangKind.STOPPED:
            where = _at(one)
            return f"{who} has been stopped for {hang.duration(hang.waited_s)}" + (
                f", last seen{where}" if where else ""
            )
        case HangKind.ENDED:
            return f"{who} has exited, and keeps the others waiting"
    doing = one.heartbeat.doing or "its own code"
    stood = hang.duration(hang.now_s - one.still_s)
    if hang.kind is HangKind.AT_WORK:
        stood = hang.duration(hang.waited_s)
    # Its last report, shortly before Python could no longer run in it.
    seen = ", last seen" if hang.kind is HangKind.NATIVE and _at(one) else ""
    return f"{who} keeps the others waiting: in {doing} for {stood}{seen}{_at(one)}"


def _who(one: ObservedRank, devices: Mapping[int, str]) -> str:
    device = devices.get(one.rank, "")
    return f"rank {one.rank} on {one.host}" + (f" ({device})" if device else "")


def _at(one: ObservedRank) -> str:
    """Return the rank's line in the user's code, its phase and step."""
    heartbeat = one.heartbeat
    step = f"step {heartbeat.step}" if heartbeat.step is not None else ""
    part = ", ".join(words for words in (heartbeat.phase, step) if words)
    place = f" at {heartbeat.place}" if heartbeat.place else ""
    return place + (f" ({part})" if part else "")


def _waiting_words(waiting: Sequence[ObservedRank]) -> str:
    """Return which ranks wait in what: ``ranks 0-2 wait in all_reduce``."""
    by_what: dict[str, list[int]] = {}
    for one in waiting:
        by_what.setdefault(_what(one), []).append(one.rank)
    return ", ".join(
        f"{rank_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {what}"
        for what, ranks in list(by_what.items())[:_CULPRITS_SHOWN]
    )


def _what(one: ObservedRank) -> str:
    """Return what a rank waits in: the name of the collective, if there is one."""
    if one.heartbeat.waits:
        return one.heartbeat.waits[0].operation
    return one.heartbeat.doing or "a collective"


def _fix_messages(kind: HangKind, one: ObservedRank) -> str:
    heartbeat = one.heartbeat
    if kind is HangKind.STOPPED:
        return f"on {one.host}: kill -CONT {heartbeat.pid}   # after finding out what stopped it"
    if kind is HangKind.ASLEEP:
        if heartbeat.doing.startswith(_LOADER) or heartbeat.phase == "loading data":
            return (
                f"check what the loader reads on {one.host}: a disk, a download or a worker that does not respond; "
                "DataLoader(timeout=60) turns such a wait into an error"
            )
        place = heartbeat.place or "its stacks"
        return f"see {place}: find out what only this rank waits for there"
    return _FIX[kind].format(host=one.host, pid=heartbeat.pid)


def _of_different(hang: Hang, devices: Mapping[int, str]) -> Finding:
    ways: dict[str, list[int]] = {}
    for one in hang.culprits:
        ways.setdefault(_call_messages(one) + _at(one), []).append(one.rank)
    told = [
        f"{rank_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {way}"
        for way, ranks in list(ways.items())[:_CULPRITS_SHOWN]
    ]
    same_op = len({_what(one) for one in hang.culprits}) == 1
    calls = [call for one in hang.culprits for call in one.heartbeat.waits[:1]]
    numbered = (
        f"all of these are collective number {calls[0].number} of their group, and "
        if calls
        else ""
    )
    return Finding(
        name="collective-shapes-differ" if same_op else "collectives-differ",
        status=Status.WARNING,
        what=f"the ranks called different collectives and wait for each other forever: {'; '.join(told)}",
        why=numbered
        + (
            "tensors of different shapes or dtypes cannot be combined"
            if same_op
            else "collectives are matched in the order in which each rank calls them: one rank called something that "
            "others did not, or ran more or fewer steps"
        ),
        fix=FIX_SHAPES if same_op else FIX_ORDER,
        evidence=_messages_evidence(hang, devices),
    )


def _of_unseen(hang: Hang, devices: Mapping[int, str]) -> Finding:
    return Finding(
        name="ranks-not-seen",
        status=Status.WARNING,
        what=f"{_waiting_words(hang.waiting)} for {hang.duration(hang.waited_s)}{_at(hang.culprits[0])}; they wait "
        f"for one or more of {rank_text(hang.unseen)}, which {'is' if len(hang.unseen) == 1 else 'are'} on other hosts",
        why="all ranks on these hosts have called the collective",
        fix="muster hang --hosts …   # all hosts of the job",
        evidence=_messages_evidence(hang, devices),
    )


def _of_all_waiting(hang: Hang, devices: Mapping[int, str]) -> Finding:
    waited = hang.duration(hang.waited_s)
    if hang.kind is HangKind.UNEQUAL:
        return Finding(
            name="collectives-out-of-step",
            status=Status.WARNING,
            what=f"all ranks have waited for {waited}, but not in the same collective: "
            + "; ".join(
                f"rank {one.rank} in {_call_messages(one)}{_messages_number(one)}{_at(one)}"
                for one in hang.culprits[:_CULPRITS_SHOWN]
            ),
            why="collectives are matched per group, in the order in which each rank calls them; ranks in different "
            "collectives wait forever",
            fix=FIX_ORDER,
            evidence=_messages_evidence(hang, devices),
        )
    return Finding(
        name="collective-does-not-end",
        status=Status.WARNING,
        what=f"all ranks have been in {_what(hang.culprits[0])} for {waited}, but it does not finish{_at(hang.culprits[0])}",
        why="no rank is missing: the collective is slow, or data between the ranks does not arrive",
        fix=FIX_NETWORK,
        evidence=_messages_evidence(hang, devices),
    )


def _call_messages(one: ObservedRank) -> str:
    """Return what a rank called: ``all_reduce of Float [1024]``."""
    if not one.heartbeat.waits:
        return _what(one)
    called = one.heartbeat.waits[0]
    kind = f"{called.dtype} " if called.dtype else ""
    return called.operation + (f" of {kind}{called.shapes}" if called.shapes else "")


def _messages_number(one: ObservedRank) -> str:
    return f", number {one.heartbeat.waits[0].number}" if one.heartbeat.waits else ""


def _messages_evidence(hang: Hang, devices: Mapping[int, str]) -> str:
    """Return a line for each rank, the ranks that cause the hang first; at most 8 ranks."""
    everybody = {one.rank: one for one in (*hang.culprits, *hang.waiting)}
    lines = [
        f"{_who(one, devices)}: {one.heartbeat.doing or 'its own code'}"
        f" for {hang.duration(hang.now_s - one.still_s)}{_at(one)}"
        for one in list(everybody.values())[:_RANKS_SHOWN]
    ]
    if len(everybody) > _RANKS_SHOWN:
        lines.append(f"… and {len(everybody) - _RANKS_SHOWN} more")
    return "\n".join(lines)
