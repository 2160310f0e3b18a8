"""Run ``muster hang``: connect to the hosts, find the job, and watch its ranks until it is clear whether they hang."""

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.hang import report
from torchmuster.diagnose.hang.host_connection import HostConnection, connected
from torchmuster.diagnose.hang.job_watch import JobWatch, SeenRank
from torchmuster.diagnose.hang.rank_processes import RanksHere
from torchmuster.diagnose.hang.rank_stacks import RankSnapshot, refuse_untraceable
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch.transports.ssh import is_this_host

_CONNECTED_WITHIN_S = 30.0
_ANSWERED_WITHIN_S = 60.0
_PROGRESS_AFTER_S = 4.0


@dataclass(frozen=True, kw_only=True)
class HangRequest:
    """What the user typed; ``jobs`` are process ids on this host, or the name of a job."""

    jobs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # besides this one
    python: str
    within_s: float


@dataclass(frozen=True, kw_only=True)
class HangResult:
    """What is known about a job."""

    job: str
    watch: JobWatch
    seconds: float
    findings: tuple[Finding, ...]


async def find_hang(request: HangRequest, say: Callable[[str], None]) -> HangResult:
    """Find the job and watch it; ``say`` prints progress."""
    here = socket.gethostname()
    hosts = {here: None}
    for host in request.hosts:
        if not is_this_host(host):
            hosts[host] = None
    async with contextlib.AsyncExitStack() as stack:
        connections = {}
        for host in hosts:
            connection = connected(host, request.python)
            connections[host] = await stack.enter_async_context(connection)
        ranks_on, unreachable = await _find_ranks(connections)
        job, ranks = _choose_job(request.jobs, ranks_on, here, unreachable)
        watch = JobWatch(ranks)
        began_s = time.monotonic()
        await _watch_ranks(watch, connections, request.within_s, say)
        seconds = time.monotonic() - began_s
    findings = [report.conclusion(watch, seconds)]
    for finding in unreachable:
        findings.append(dataclasses.replace(finding, status=Status.WARNING))
    return HangResult(job=job, watch=watch, seconds=seconds, findings=tuple(findings))


async def _find_ranks(
    connections: Mapping[str, HostConnection],
) -> tuple[dict[str, RanksHere], list[Finding]]:
    """Return the ranks on each host, and why hosts could not be reached."""
    requests = []
    for connection in connections.values():
        requests.append(connection.ask("find-ranks", None, RanksHere, within_s=_CONNECTED_WITHIN_S))
    answers = await asyncio.gather(*requests, return_exceptions=True)
    ranks_on: dict[str, RanksHere] = {}
    unreachable: list[Finding] = []
    for (host, connection), answer in zip(connections.items(), answers, strict=True):
        if not isinstance(answer, BaseException):
            ranks_on[host] = answer
        elif not isinstance(answer, MusterError):
            raise answer
        elif connection.trouble is None:
            raise _impossible(answer)
        else:
            unreachable.append(connection.trouble)
    return ranks_on, unreachable


async def _watch_ranks(
    watch: JobWatch,
    connections: Mapping[str, HostConnection],
    within_s: float,
    say: Callable[[str], None],
) -> None:
    """Watch the ranks until they hang, move, or the time is over."""
    began_s, reported_progress = time.monotonic(), False

    async def take_snapshots(host: str) -> None:
        snapshots = await connections[host].ask(
            "take-snapshots",
            watch.request_for(host),
            list[RankSnapshot],
            within_s=_ANSWERED_WITHIN_S,
        )
        watch.add(host, snapshots)

    while True:
        try:
            await asyncio.gather(*map(take_snapshots, watch.hosts))
        except MusterError as error:
            raise _impossible(error) from None
        passed_s = time.monotonic() - began_s
        if watch.judge() is not None or watch.moving or watch.exited or passed_s >= within_s:
            return
        if not reported_progress and passed_s >= _PROGRESS_AFTER_S:
            reported_progress = True
            say(f"{report.progress(watch)}; watching for up to {within_s:.0f} s")


def _impossible(error: MusterError) -> Impossible:
    """Return an error with the exit code for "cannot look": 1 means that there is a hang."""
    return Impossible(error.what, why=error.why, fix=error.fix)


def _choose_job(
    wanted: Sequence[str],
    ranks_on: Mapping[str, RanksHere],
    here: str,
    unreachable: Sequence[Finding],
) -> tuple[str, list[SeenRank]]:
    """Return the job with these names or process ids, or the only one, with its ranks on all hosts."""
    jobs: dict[str, list[SeenRank]] = {}
    for host, answer in ranks_on.items():
        for process in answer.ranks:
            jobs.setdefault(process.job, []).append(SeenRank(host=host, process=process))
    chosen = dict(jobs)
    for argument in wanted:
        for job, ranks in jobs.items():
            if not _is_named(argument, job, [rank for rank in ranks if rank.host == here]):
                chosen.pop(job, None)
        if argument.isdecimal() and not chosen:
            refuse_untraceable(int(argument))  # its environment cannot be read either
    if len(chosen) != 1:
        raise report.not_one_job(wanted, chosen or jobs, ranks_on, unreachable)
    return chosen.popitem()


def _is_named(argument: str, job: str, ranks_here: Sequence[SeenRank]) -> bool:
    """Return whether an argument is the begin of a job's name, or the id of one of its processes on this host."""
    if not argument.isdecimal():
        return job.startswith(argument)
    pid = int(argument)
    return any(pid in (rank.process.pid, *rank.process.related) for rank in ranks_here)
