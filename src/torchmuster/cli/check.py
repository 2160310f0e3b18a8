"""``muster check``: check whether hosts can train together."""

import dataclasses
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output, schedulers
from torchmuster.cli.launch_options import JoinOptions
from torchmuster.cli.launching import job_and_transport
from torchmuster.cli.options import JsonOptions, command, flag
from torchmuster.cli.scripts import Script
from torchmuster.cli.setting_options import settings_of
from torchmuster.errors import ExitCode
from torchmuster.runfolder import RunFolder, create_run_folder
from torchmuster.units import format_seconds

if TYPE_CHECKING:
    from torchmuster.diagnose.result import GroupResult

PROBE = "torchmuster.diagnose.probes.collectives"
RANKS_ON_A_CPU = 2
REACH_S = 3.0
GRACE_S = 2.0  # the ranks of a check have nothing to save


@dataclass(frozen=True, kw_only=True)
class CheckOptions(JoinOptions, JsonOptions):
    """The flags of ``muster check``."""

    quick: bool = flag("check hosts and connections, start no ranks", default=False)


@command(
    CheckOptions,
    more="""
    Connects to the hosts, checks each, tests the connections between them in both directions, and
    runs real ranks and compares their results. Reports what is wrong, why, and how to fix it.
    """,
    examples=[
        "muster check                      this machine: a rank on each GPU, or two on the CPU",
        "muster check --hosts a,b:2,c      three hosts over ssh",
        "muster check --join               this machine, and one that joins with a code",
        "muster check --slurm --nodes 4    as a Slurm job; inside a job, leave out --slurm",
    ],
)
def run(options: CheckOptions) -> int:
    """Check the hosts and return the exit code."""
    resolved = settings_of(options)
    spec = jobs.job_from(
        options,
        resolved,
        Script(command=(PROBE,), module=True),
        name="check",
        command_line=options.command_line,
    )
    if schedulers.submits(options):
        return schedulers.submit(options, spec)
    on_cpu = spec.device == "cpu" or not jobs.sees_gpus()
    spec, transport = job_and_transport(options, spec, resolved)
    if len(transport.places) < 2 and spec.ranks is None and on_cpu:
        # One rank has no other rank to communicate with.
        spec = dataclasses.replace(spec, ranks=RANKS_ON_A_CPU)
    from torchmuster.diagnose.group import GroupCheck
    from torchmuster.launch.launcher.launch import run_task

    run = create_run_folder(options.runs, spec.name)
    # Blocked connections are tried again, so each try can be shorter than in a run.
    spec = dataclasses.replace(
        spec, limits=dataclasses.replace(spec.limits, reach_s=REACH_S, grace_s=GRACE_S)
    )
    console = jobs.console_for(run)
    check = GroupCheck(spec, transport, console, run, quick=options.quick)
    code = run_task(check, console)
    result = check.result
    if result is not None:
        shown = code in (ExitCode.GOOD, ExitCode.FAILED)
        _print_result(result, run, as_json=options.json, shown=shown)
    return code


def _print_result(result: "GroupResult", run: RunFolder, *, as_json: bool, shown: bool) -> None:
    """Write the report and print the result, unless the launcher has already printed the error."""
    from torchmuster.diagnose import report
    from torchmuster.diagnose.result import failing_hosts, headline

    if as_json:
        output.print_json(report.check_json(result))
    elif shown:
        width = shutil.get_terminal_size().columns
        output.print_coloured(
            report.check_text(result, width=width, colour=output.wants_colour(sys.stdout))
        )
        took = format_seconds(result.seconds)
        output.print_text(f"\n{headline(result)}, in {took}; report: {run.path}/check.json")
        failing = failing_hosts(result.findings)
        if failing and len(failing) < len(result.machines):
            output.print_text(
                f"without the hosts that failed: sbatch --exclude={','.join(failing)} …"
            )
    report.write_check_report(run.path, result)
