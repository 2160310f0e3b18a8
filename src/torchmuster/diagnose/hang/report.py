"""What ``muster hang`` reports: the finding with the ranks grouped by what they do, notes, and errors about jobs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from torchmuster.diagnose.hang.job_watch import JobWatch, SeenRank
from torchmuster.diagnose.hang.rank_processes import RanksHere
from torchmuster.diagnose.hang.rank_stacks import WorkerSnapshot
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.detector import BUSY_AFTER_S, IDLE_AFTER_S
from torchmuster.launch.hangs.messages import hang_finding
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS, Hang
from torchmuster.launch.rank.stack import WAITS_FOR_OTHERS
from torchmuster.units import format_seconds, plural, rank_text

_GROUPS_SHOWN = 8
_WORKERS_SHOWN = 4
_FRAMES_SHOWN = 8
_COMMAND_SHOWN = 120


def conclusion(watch: JobWatch, seconds: float) -> Finding:
    """Return the result: the hang, that the ranks move, or why neither is known."""
    if watch.hang is not None:
        return _hang_finding(watch, watch.hang)
    if watch.exited:
        return Finding(
            name="job-exited",
            status=Status.NOTE,
            what="all ranks have exited",
            fix="to find out why a run fails, start it with: muster run",
        )
    if watch.unread:
        raise _unread(watch.unread)
    duration = format_seconds(seconds)
    if watch.moving:
        return Finding(
            name="ranks-move",
            status=Status.OK,
            what=f"the ranks are making progress: none of them stood still in the last {duration}",
            evidence="\n".join(_group_lines(watch.ranks)),
        )
    why = "no rank waits for another; ranks that all sleep, load data or compute may just be slow"
    if any(_is_waiting(rank) for rank in watch.ranks):
        why = (
            f"a hang is reported after ranks have waited {IDLE_AFTER_S:g} s for an idle rank, or {BUSY_AFTER_S:g} s "
            "for one that computes"
        )
    return Finding(
        name="hang-not-certain",
        status=Status.NOTE,
        what=f"{_still_text(watch)} made no progress for {duration}, which does not prove a hang",
        why=why,
        fix="muster hang --within 5m   # watch for longer",
        evidence="\n".join(_group_lines(watch.ranks)),
    )


def progress(watch: JobWatch) -> str:
    """Return which ranks stand still, in one line."""
    return f"no progress of {_still_text(watch)}"


def rank_json(rank: SeenRank) -> dict[str, Any]:
    """Return a rank and what it does, as plain JSON types."""
    snapshot: dict[str, Any] = msgspec.to_builtins(rank.snapshot)
    return {"rank": rank.rank, "host": rank.host, "moved": rank.moved > 0, **snapshot}


def _hang_finding(watch: JobWatch, hang: Hang) -> Finding:
    """Return the hang with the groups of ranks, the source lines, and a stack of a rank that causes it."""
    culprits = {observation.rank for observation in hang.culprits}
    activities = [_activity(rank) for rank in watch.ranks]

    def rarest_culprit_first(rank: SeenRank) -> tuple[bool, int]:
        return rank.rank not in culprits, activities.count(_activity(rank))

    ranks = sorted(watch.ranks, key=rarest_culprit_first)
    worker: WorkerSnapshot | None = None
    details: dict[int, str] = {}
    for rank in watch.ranks:
        if rank.rank in culprits and rank.snapshot is not None and rank.snapshot.workers:
            worker = rank.snapshot.workers[0]
            details[rank.rank] = f"its loader worker is in {_worker_text(worker)}"
            break
    finding = hang_finding(hang, {}, details)
    called = {waiting.heartbeat.doing for waiting in hang.waiting} & WAITS_FOR_OTHERS
    why = finding.why
    if hang.has_culprit and called:
        why = f"it has not called {' or '.join(sorted(called))}; {why}"
    lines = _group_lines(ranks)
    if worker is not None:
        lines += _stack_lines(f"process {worker.pid}", worker.stack)
    elif ranks[0].snapshot is not None:
        lines += _stack_lines(f"rank {ranks[0].rank}", ranks[0].snapshot.stack)
    return dataclasses.replace(finding, status=Status.FAILURE, why=why, evidence="\n".join(lines))


def _unread(ranks: Sequence[SeenRank]) -> Impossible:
    problems = [rank.snapshot.problem for rank in ranks if rank.snapshot is not None]
    first = ranks[0]
    return Impossible(
        f"cannot read the stack of {rank_text(rank.rank for rank in ranks)}",
        why="; ".join(dict.fromkeys(problems)),
        fix=f"on {first.host}: py-spy dump --pid {first.process.pid}   # try it by hand",
    )


def _still_text(watch: JobWatch) -> str:
    return rank_text(watch.still or [rank.rank for rank in watch.ranks])


def _is_waiting(rank: SeenRank) -> bool:
    return rank.snapshot is not None and rank.snapshot.waiting


def _group_lines(ranks: Sequence[SeenRank]) -> list[str]:
    """Return a line for each thing that ranks do, and for their data loader workers."""
    groups: dict[str, list[SeenRank]] = {}
    for rank in ranks:
        groups.setdefault(_activity(rank), []).append(rank)
    lines: list[str] = []
    for activity, members in list(groups.items())[:_GROUPS_SHOWN]:
        name = rank_text(rank.rank for rank in members)
        if len(members) == 1:
            name += f" (process {members[0].process.pid} on {members[0].host})"
        lines.append(f"{name}: {activity}")
        lines += _worker_lines(members[0])
    if len(groups) > _GROUPS_SHOWN:
        lines.append(f"… and {len(groups) - _GROUPS_SHOWN} more (--json)")
    return lines


def _activity(rank: SeenRank) -> str:
    """Return what a rank does: ``all_reduce at train.py:88 in step (forward, waits for other ranks)   > …``."""
    snapshot = rank.snapshot
    if snapshot is None or snapshot.problem:
        return "unknown"
    state = "idle"
    if snapshot.state in ("T", "t"):
        state = "stopped"
    elif snapshot.state == "D":
        state = "blocked in the kernel"
    elif snapshot.waiting:
        state = "waits for other ranks"
    elif snapshot.busy >= BUSY_PROCESSORS:
        state = "busy"
    text = snapshot.doing or "its own code"
    if snapshot.place:
        text += f" at {snapshot.place}"
    text += f" ({', '.join(filter(None, (snapshot.phase, state)))})"
    if snapshot.source:
        text += f"   > {snapshot.source}"
    return text


def _worker_lines(rank: SeenRank) -> list[str]:
    lines: list[str] = []
    if rank.snapshot is None:
        return lines
    workers = rank.snapshot.workers
    for worker in workers[:_WORKERS_SHOWN]:
        line = f"  its loader worker, process {worker.pid}: {_worker_text(worker)}"
        lines.append(f"{line}   > {worker.source}" if worker.source else line)
    if len(workers) > _WORKERS_SHOWN:
        lines.append(f"  … and {len(workers) - _WORKERS_SHOWN} more workers")
    return lines


def _worker_text(worker: WorkerSnapshot) -> str:
    return f"{worker.doing or 'its own code'} at {worker.place}"


def _stack_lines(name: str, stack: Sequence[str]) -> list[str]:
    if not stack:
        return []
    lines = [f"stack of {name}, innermost call first:"]
    for frame in stack[:_FRAMES_SHOWN]:
        lines.append(f"  {frame}")
    if len(stack) > _FRAMES_SHOWN:
        lines.append(f"  … {len(stack) - _FRAMES_SHOWN} more (--json)")
    return lines


# ---- which job


def job_text(ranks: Sequence[SeenRank]) -> str:
    """Return a job as text: its ranks, hosts and command."""
    hosts = ", ".join(dict.fromkeys(rank.host for rank in ranks))
    world_size = max(rank.process.world_size for rank in ranks)
    count = plural(world_size, "rank")
    if len(ranks) < world_size:
        count = f"{len(ranks)} of {count}"
    command = ranks[0].process.command
    if len(command) > _COMMAND_SHOWN:
        command = f"{command[:_COMMAND_SHOWN]}…"
    return f"{count} on {hosts}: {command}"


def not_one_job(
    wanted: Sequence[str],
    jobs: Mapping[str, Sequence[SeenRank]],
    ranks_on: Mapping[str, RanksHere],
    unreachable: Sequence[Finding],
) -> Impossible:
    """Return the error if no job is meant, or several are."""
    if unreachable and not ranks_on:
        first = unreachable[0]
        return Impossible(first.what, why=first.why, fix=first.fix)
    if jobs:
        what, why = f"there are {len(jobs)} distributed jobs", "muster hang looks at one at a time"
        if wanted:
            what = f"{' '.join(wanted)} does not name one of {plural(len(jobs), 'job')}"
            why = "a job is named by MASTER_ADDR:PORT, by the id of a rank, or of a process above or below it"
        commands = [f"muster hang {job}   # {job_text(ranks)}" for job, ranks in jobs.items()]
        return Impossible(what, why=why, fix="\n".join(commands))
    why = "no process has RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in its environment"
    fix = "muster hang --hosts …   # if the ranks are on other hosts"
    unreadable = sum(answer.unreadable for answer in ranks_on.values())
    if unreadable:
        why += f"; processes that could not be read: {unreadable}"
        fix = f'sudo "$(command -v muster)" hang   # reads processes of all users\n{fix}'
    hosts = ", ".join(ranks_on)
    return Impossible(f"there are no ranks of a distributed job on {hosts}", why=why, fix=fix)
