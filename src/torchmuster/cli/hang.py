"""``muster hang``: name the rank that keeps a hanging job waiting, whatever started the job."""

import asyncio
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, argument, command, flag, names
from torchmuster.finding import exit_code, render
from torchmuster.units import parse_seconds

if TYPE_CHECKING:
    from torchmuster.diagnose.hang.find_hang import HangResult

# A rank that computes while the others wait is reported after 60 s.
WITHIN_S = 70.0


@dataclass(frozen=True, kw_only=True)
class HangOptions(JsonOptions):
    """The flags of ``muster hang``."""

    jobs: tuple[str, ...] = argument(
        "a process of the job, or the job's MASTER_ADDR:PORT", metavar="PID", many=True
    )
    hosts: tuple[str, ...] = flag(
        "ssh names of the job's other hosts: a,b", default=(), parse=names, metavar="HOSTS"
    )
    remote_python: str = flag(
        "Python with torchmuster and py-spy on the other hosts (default: the same path as here)",
        default=sys.executable,
        metavar="PATH",
    )
    within: float = flag(
        f"watch until the result is clear, for at most DURATION (default: {WITHIN_S:.0f}s)",
        default=WITHIN_S,
        parse=parse_seconds,
        metavar="DURATION",
    )


@command(
    HangOptions,
    usage="muster hang [options] [PID ...]",
    more="""
    For jobs that torchrun, accelerate or another launcher started; muster run reports hangs by itself.
    Reads the ranks' stacks with py-spy (pip install 'torchmuster[hang]') and compares them.
    Does not change or stop the job. The exit code is 1 if it hangs, 0 if its ranks make progress.
    """,
    examples=[
        "muster hang                       the only distributed job on this machine",
        "muster hang 4711                  the job of this process: a rank, or torchrun",
        "muster hang --hosts a,b           a job on this machine and two others, over ssh",
        "muster hang --json > hang.json    with the whole stack of every rank",
    ],
)
def run(options: HangOptions) -> int:
    """Watch the job and return the exit code of what was found."""
    from torchmuster.diagnose.hang.find_hang import HangRequest, find_hang
    from torchmuster.launch.job import parse_hosts

    request = HangRequest(
        jobs=options.jobs,
        hosts=tuple(host.name for host in parse_hosts(options.hosts)),
        python=options.remote_python,
        within_s=options.within,
    )
    result = asyncio.run(find_hang(request, lambda text: output.say(f"muster: {text}")))
    if options.json:
        _print_json(result)
    else:
        _show_hang(result)
    return exit_code(result.findings)


def _show_hang(result: "HangResult") -> None:
    from torchmuster.diagnose.hang.report import job_text

    address = result.job.partition("/")[0]  # without torchrun's run id
    output.print_text(f"job {address}: {job_text(result.watch.ranks)}\n")
    width = shutil.get_terminal_size().columns
    output.print_coloured(
        render(result.findings, width=width, colour=output.wants_colour(sys.stdout))
    )


def _print_json(result: "HangResult") -> None:
    from torchmuster.diagnose.hang.report import rank_json

    output.print_json(
        {
            "job": result.job,
            "world_size": result.watch.world_size,
            "seconds": round(result.seconds, 1),
            "findings": [finding.as_json() for finding in result.findings],
            "ranks": [rank_json(rank) for rank in result.watch.ranks if rank.snapshot is not None],
        }
    )
