"""Run ``muster hang``: connect to the hosts, find the job, and watch its ranks until it is clear whether they hang."""

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.diagnose.hang import report
from torchmuster.diagnose.hang.host_connection import HostConnection, connected
from torchmuster.diagnose.hang.job_watch import JobWatch, SeenRank
from torchmuster.diagnose.hang.rank_processes import RanksHere
from torchmuster.diagnose.hang.rank_stacks import RankLook, refuse_untraceable
from torchmuster.diagnose.unreachable_hosts import why_unreachable
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch.transports.ssh import is_this_host

_CONNECTED_WITHIN_S = 30.0
_LOOKED_WITHIN_S = 60.0
_SAY_AFTER_S = 4.0


@dataclass(frozen=True, kw_only=True)
class HangRequest:
    """What the user asked for; ``which`` are process ids on this host, or the name of a job."""

    which: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # besides this one
    python: str
    within_s: float
    nonblocking: bool = False


@dataclass(frozen=True, kw_only=True)
class HangResult:
    """What was found about a job."""

    job: str
    watch: JobWatch
    seconds: float
    findings: tuple[Finding, ...]


async def find_hang(request: HangRequest, say: Callable[[str], None]) -> HangResult:
    """Find the job and watch it; ``say`` prints progress."""
    here = socket.gethostname()
    others = [one for one in request.hosts if not is_this_host(one)]
    async with contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(connected(host, request.python))
            for host in dict.fromkeys([here, *others])
        ]
        answers = await asyncio.gather(*map(_ranks_of, connections), return_exceptions=True)
        found: dict[str, RanksHere] = {}
        unreachable: list[Finding] = []
        for connection, answer in zip(connections, answers, strict=True):
            if isinstance(answer, RanksHere):
                found[connection.name] = answer
            elif isinstance(answer, MusterError) and connection.trouble is not None:
                unreachable.append(await why_unreachable(connection.name, connection.trouble))
            elif isinstance(answer, MusterError):
                raise _impossible(answer)
            else:
                raise answer
        job, ranks = _choose_job(request.which, found, here, unreachable)
        watch = JobWatch(ranks)
        by_name = {one.name: one for one in connections}
        began_s = time.monotonic()
        finding = await _watch_ranks(watch, by_name, request, say)
        return HangResult(
            job=job,
            watch=watch,
            seconds=time.monotonic() - began_s,
            findings=(
                report.conclusion(watch, finding, time.monotonic() - began_s),
                *(dataclasses.replace(one, status=Status.WARNING) for one in unreachable),
                *report.notes(watch, found),
            ),
        )


async def _ranks_of(connection: HostConnection) -> RanksHere:
    answer = await connection.ask("find-ranks", within_s=_CONNECTED_WITHIN_S)
    return msgspec.convert(answer, RanksHere)


async def _watch_ranks(
    watch: JobWatch,
    connections: dict[str, HostConnection],
    request: HangRequest,
    say: Callable[[str], None],
) -> Finding | None:
    """Watch the ranks until they hang, move, or the time is over; return the hang."""
    began_s, said = time.monotonic(), False

    async def look(host: str) -> None:
        asked = msgspec.to_builtins(watch.request_for(host, nonblocking=request.nonblocking))
        answer = await connections[host].ask("look-at-ranks", asked, within_s=_LOOKED_WITHIN_S)
        watch.heard(host, msgspec.convert(answer, list[RankLook]))

    while True:
        try:
            await asyncio.gather(*map(look, watch.hosts))
        except MusterError as error:
            raise _impossible(error) from None
        finding = watch.judge()
        passed_s = time.monotonic() - began_s
        if finding is not None or watch.moving or watch.exited or passed_s >= request.within_s:
            return finding
        if not said and passed_s >= _SAY_AFTER_S:
            said = True
            say(f"{report.progress(watch)}; watching for up to {request.within_s:.0f} s")


def _impossible(error: MusterError) -> Impossible:
    """Return an error with the exit code for "cannot look": 1 means that there is a hang."""
    return Impossible(error.what, why=error.why, fix=error.fix)


def _choose_job(
    which: Sequence[str], found: dict[str, RanksHere], here: str, unreachable: Sequence[Finding]
) -> tuple[str, list[SeenRank]]:
    """Return the job that was asked for, or the only one, with its ranks on all hosts."""
    jobs: dict[str, list[SeenRank]] = {}
    for host, answer in found.items():
        for process in answer.ranks:
            jobs.setdefault(process.job, []).append(SeenRank(host=host, process=process))
    wanted = set(jobs)
    for word in which:
        named = {
            job
            for job, ranks in jobs.items()
            if job.startswith(word)
            or any(
                word.isdecimal()
                and one.host == here
                and int(word) in (one.process.pid, *one.process.related)
                for one in ranks
            )
        }
        if not named:
            if word.isdecimal():
                refuse_untraceable(int(word))  # its environment cannot be read either
            raise report.no_such_job(word, jobs)
        wanted &= named
    if not wanted:
        unreadable = sum(answer.unreadable for answer in found.values())
        raise report.no_job(list(found), unreadable, unreachable)
    if len(wanted) > 1:
        raise report.several_jobs({job: jobs[job] for job in jobs if job in wanted})
    (job,) = wanted
    return job, jobs[job]
