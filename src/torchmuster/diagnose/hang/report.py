"""What ``muster hang`` reports: the finding with the ranks grouped by what they do, notes, and errors about jobs."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster.diagnose.hang.job_watch import JobWatch, SeenRank
from torchmuster.diagnose.hang.rank_processes import RanksHere
from torchmuster.diagnose.hang.rank_stacks import WorkerLook
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS
from torchmuster.launch.launcher.console import rank_text
from torchmuster.launch.rank.stack import WAITS_FOR_OTHERS
from torchmuster.units import format_seconds, plural

_GROUPS_SHOWN = 8
_WORKERS_SHOWN = 4
_FRAMES_SHOWN = 8
_COMMAND_SHOWN = 120


def conclusion(watch: JobWatch, hang: Finding | None, seconds: float) -> Finding:
    """Return the result: the hang, that the ranks move, or why neither is known."""
    took = format_seconds(seconds)
    if hang is not None:
        worker = _first_worker(watch)
        waits_for = f"; its loader worker is in {_worker_text(worker)}" if worker else ""
        return dataclasses.replace(
            hang,
            status=Status.FAILURE,
            what=hang.what.replace("; ", f"{waits_for}; ", 1),
            why=_not_called(watch) + hang.why,
            evidence=_hang_evidence(watch),
        )
    if watch.exited:
        return Finding(
            name="job-exited",
            status=Status.NOTE,
            what="all ranks have exited",
            fix="to find out why a run fails, start it with: muster run",
        )
    if unread := watch.unread:
        problems = dict.fromkeys(one.look.problem for one in unread if one.look)
        raise Impossible(
            f"cannot read the stack of {rank_text(one.rank for one in unread)}",
            why="; ".join(problems),
            fix=f"on {unread[0].host}: py-spy dump --pid {unread[0].process.pid}   # try it by hand",
        )
    if watch.moving:
        return Finding(
            name="ranks-move",
            status=Status.OK,
            what=f"the ranks are making progress: none of them stood still in the last {took}",
            evidence="\n".join(_rank_groups(watch.ranks)),
        )
    still = watch.still or [one.rank for one in watch.ranks]
    waiting = any(one.look and one.look.waiting for one in watch.ranks)
    return Finding(
        name="hang-not-certain",
        status=Status.NOTE,
        what=f"{rank_text(still)} did not move for {took}, which does not prove a hang",
        why="a hang is reported after ranks have waited 12 s for an idle rank, or 60 s for one that computes"
        if waiting
        else "no rank waits for another; ranks that all sleep, load data or compute may just be slow",
        fix="muster hang --for 5min   # watch for longer",
        evidence=_hang_evidence(watch),
    )


def notes(watch: JobWatch, found: Mapping[str, RanksHere]) -> list[Finding]:
    """Return other sources of information about a hang on GPUs: flight recorder dumps, NCCL's RAS."""
    if watch.hang is None:
        return []
    told = []
    if dumps := [one.process.recorder_file for one in watch.ranks if one.process.recorder_file]:
        file = Path(dumps[0])
        prefix = file.name.rstrip("0123456789")
        told.append(
            Finding(
                name="flight-recorder-dumped",
                status=Status.NOTE,
                what=f"{plural(len(dumps), 'rank')} wrote a flight recorder dump: {file.with_name(prefix)}*",
                fix=shlex.join(["torchfrtrace", "--prefix", prefix, str(file.parent)]),
            )
        )
    elif any(one.process.uses_gpu for one in watch.ranks):
        told.append(
            Finding(
                name="flight-recorder-not-dumped",
                status=Status.NOTE,
                what="there is no flight recorder dump yet, which would list the collectives of each rank",
                why="torch writes it when a collective times out: after 10 minutes, unless init_process_group "
                "sets another timeout",
                fix="ls ~/.cache/torch/comm_lib_trace_rank_*   # after the timeout; TORCH_FR_DUMP_TEMP_FILE changes "
                "the path",
            )
        )
    if hosts := [host for host, answer in found.items() if answer.nccl_ras]:
        told.append(
            Finding(
                name="nccl-ras",
                status=Status.NOTE,
                what=f"NCCL's RAS service reports the state of its communicators on {', '.join(hosts)}, port 28028",
                fix="ncclras -v",
            )
        )
    return told


def progress(watch: JobWatch) -> str:
    """Return which ranks stand still, in one line."""
    still = watch.still or [one.rank for one in watch.ranks]
    return f"{rank_text(still)} {'does' if len(still) == 1 else 'do'} not move"


def rank_json(one: SeenRank) -> dict[str, Any]:
    """Return a rank and what it does, as plain JSON types."""
    look = one.look
    assert look is not None
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.process.pid,
        "state": look.state,
        "busy_cpus": look.busy,
        "moved": one.moved > 0,
        "waits_for_ranks": look.waiting,
        "doing": look.doing,
        "place": look.place,
        "phase": look.phase,
        "source": look.source,
        "stack": list(look.stack),
        "workers": [msgspec.to_builtins(worker) for worker in look.workers],
    }


def _hang_evidence(watch: JobWatch) -> str:
    """Return what the ranks do, and the stack of the first rank that differs, or of its loader worker."""
    culprits = _culprits(watch)
    same = Counter(_does(one) for one in watch.ranks)
    ranks = sorted(
        watch.ranks, key=lambda one: (one.rank not in culprits, same[_does(one)], one.rank)
    )
    lines = _rank_groups(ranks)
    worker = _first_worker(watch)
    stack = worker.stack if worker else ranks[0].look.stack if ranks[0].look else ()
    if culprits and stack:
        whose = f"process {worker.pid}" if worker else f"rank {ranks[0].rank}"
        lines.append(f"stack of {whose}, innermost call first:")
        lines += [f"  {frame}" for frame in stack[:_FRAMES_SHOWN]]
        if len(stack) > _FRAMES_SHOWN:
            lines.append(f"  … {len(stack) - _FRAMES_SHOWN} more (--json)")
    return "\n".join(lines)


def _not_called(watch: JobWatch) -> str:
    """Return what the rank that keeps the others waiting has not called, as the start of a sentence."""
    hang = watch.hang
    if hang is None or not hang.has_culprit:
        return ""
    called = {one.heartbeat.doing for one in hang.waiting} & WAITS_FOR_OTHERS
    return f"it has not called {' or '.join(sorted(called))}; " if called else ""


def _culprits(watch: JobWatch) -> list[int]:
    return [one.rank for one in watch.hang.culprits] if watch.hang else []


def _first_worker(watch: JobWatch) -> WorkerLook | None:
    """Return the data loader worker that the blocking rank waits for."""
    culprits = _culprits(watch)
    looks = (one.look for one in watch.ranks if one.rank in culprits and one.look)
    return next((worker for look in looks for worker in look.workers), None)


def _rank_groups(ranks: Sequence[SeenRank]) -> list[str]:
    """Return a line for each thing that ranks do, and for their data loader workers."""
    groups: dict[str, list[SeenRank]] = {}
    for one in ranks:
        groups.setdefault(_does(one), []).append(one)
    lines: list[str] = []
    for does, some in list(groups.items())[:_GROUPS_SHOWN]:
        who = rank_text(one.rank for one in some)
        if len(some) == 1:
            who += f" (process {some[0].process.pid} on {some[0].host})"
        lines += [f"{who}: {does}", *_worker_lines(some[0])]
    if len(groups) > _GROUPS_SHOWN:
        lines.append(f"… and {len(groups) - _GROUPS_SHOWN} more (--json)")
    return lines


def _does(one: SeenRank) -> str:
    look = one.look
    if look is None or look.problem:
        return "unknown"
    if look.state in ("T", "t", "D"):
        state = "stopped" if look.state in ("T", "t") else "blocked in the kernel"
    elif look.waiting:
        state = "waits for other ranks"
    else:
        state = "busy" if look.busy >= BUSY_PROCESSORS else "idle"
    phase = f"{look.phase}, " if look.phase else ""
    at = f" at {look.place}" if look.place else ""
    source = f"   > {look.source}" if look.source else ""
    return f"{look.doing or 'its own code'}{at} ({phase}{state}){source}"


def _worker_lines(one: SeenRank) -> Iterable[str]:
    workers = one.look.workers if one.look else ()
    for worker in workers[:_WORKERS_SHOWN]:
        source = f"   > {worker.source}" if worker.source else ""
        yield f"  its loader worker, process {worker.pid}: {_worker_text(worker)}{source}"
    if len(workers) > _WORKERS_SHOWN:
        yield f"  … and {len(workers) - _WORKERS_SHOWN} more workers"


def _worker_text(worker: WorkerLook) -> str:
    return f"{worker.doing or 'its own code'} at {worker.place}"


# ---- which job


def job_text(ranks: Sequence[SeenRank]) -> str:
    """Return a job as text: its ranks, hosts and command."""
    hosts = ", ".join(dict.fromkeys(one.host for one in ranks))
    world_size = max(one.process.world_size for one in ranks)
    some = f"{len(ranks)} of " if len(ranks) < world_size else ""
    command = ranks[0].process.command
    shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}…"
    return f"{some}{plural(world_size, 'rank')} on {hosts}: {shown}"


def no_job(hosts: Sequence[str], unreadable: int, unreachable: Sequence[Finding]) -> Impossible:
    """Return the error if no host has ranks."""
    if unreachable and not hosts:
        first = unreachable[0]
        return Impossible(first.what, why=first.why, fix=first.fix)
    why = "no process has RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in its environment"
    fix = "muster hang --hosts …   # if the ranks are on other hosts"
    if unreadable:
        why += f"; processes that could not be read: {unreadable}"
        fix = f'sudo "$(command -v muster)" hang   # reads processes of all users\n{fix}'
    return Impossible(
        f"there are no ranks of a distributed job on {', '.join(hosts)}", why=why, fix=fix
    )


def no_such_job(word: str, jobs: Mapping[str, Sequence[SeenRank]]) -> Impossible:
    """Return the error if a process or a name belongs to no job."""
    what, why = f"there is no job {word}", ""
    if word.isdecimal():
        what = f"process {word} belongs to no distributed job"
        why = "neither it nor a process that it started has RANK and WORLD_SIZE in its environment"
        if not psutil.pid_exists(int(word)):
            what, why = f"there is no process {word} on this host", "it has exited"
    return Impossible(what, why=why, fix=_commands(jobs) or "muster hang   # looks for jobs")


def several_jobs(jobs: Mapping[str, Sequence[SeenRank]]) -> Impossible:
    """Return the error if it is not clear which job is meant."""
    return Impossible(
        f"there are {len(jobs)} distributed jobs",
        why="muster hang looks at one job at a time",
        fix=_commands(jobs),
    )


def _commands(jobs: Mapping[str, Sequence[SeenRank]]) -> str:
    return "\n".join(f"muster hang {job}   # {job_text(ranks)}" for job, ranks in jobs.items())
