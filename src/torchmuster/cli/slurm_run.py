"""``muster run --slurm``: submit a job that runs the same command, and follow it."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.launch_options import HostOptions, RunControl
from torchmuster.errors import ExitCode
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural

COMMAND = (sys.executable, "-m", "torchmuster")


def submit_and_follow(options: HostOptions, spec: JobSpec, script: Sequence[str] = ()) -> int:
    """Submit the job, which runs the same command, and show its output; Ctrl-C detaches."""
    from torchmuster.launch.schedulers.slurm.jobs import follow_job
    from torchmuster.launch.schedulers.slurm.submit import log_of, render_script, submit_job

    nodes = options.nodes or NodeCounts(least=1, most=1)
    script = render_script(
        spec,
        # This command line, without the flags of the submission.
        [*COMMAND, *_without_submission(options.command_line), *script],
        options.runs,
        nodes=nodes.most + spec.spares,
        no_kill=spec.spares > 0 or nodes.least < nodes.most,
        sbatch_arguments=options.sbatch or [],
    )
    attached = not isinstance(options, RunControl) or not options.detach
    if isinstance(options, RunControl) and options.dry_run:
        if options.json:
            output.print_json({"script": script})
        else:
            output.print_text(script, end="")
        return ExitCode.GOOD
    job = submit_job(script, run_root=options.runs)
    output.print_text(job)
    output.say(f"muster: submitted as job {job}; to cancel it: scancel {job}")
    if not attached:
        return ExitCode.GOOD
    completed = False
    try:
        for news in follow_job(job, log_of(job, options.runs)):
            if isinstance(news, str):
                output.print_text(news, end="")
            else:
                output.say(f"muster: job {job}: {news.text or 'not known to squeue'}")
                completed = news.completed
    except KeyboardInterrupt:
        output.say(f"\nmuster: job {job} keeps running; to stop it: scancel {job}")
        return ExitCode.GOOD
    return ExitCode.GOOD if completed else ExitCode.FAILED


def transport_inside(spec: JobSpec) -> Transport | None:
    """Return the transport to the nodes of the current Slurm job; None if there is only this node."""
    from torchmuster.launch.schedulers.slurm import allocation

    here = allocation.allocation_here(os.environ)
    if here is None:
        return None
    allocation.check_counts(here, spec)
    if warning := allocation.few_cores(here, spec):
        output.show_findings([warning], sys.stderr)
    # The host name of a container may differ from the name of the node.
    if here.nodes in ((socket.gethostname(),), (os.environ.get("SLURMD_NODENAME"),)):
        return None  # the job has only this node
    from torchmuster.launch.transports.srun import SrunTransport

    requeued = ""
    if here.restarts:
        requeued = f", requeued {plural(here.restarts, 'time')}"
    output.say(f"muster: in Slurm job {here.job} with {len(here.nodes)} nodes{requeued}")
    return SrunTransport(here, on_event=lambda text: output.say(f"muster: {text}"))


def earlier_run(spec: JobSpec, root: Path) -> RunFolder | None:
    """Return the run to resume: that of a job which Slurm has requeued."""
    from torchmuster.launch.schedulers.slurm import allocation

    run = allocation.earlier_run(spec, root, os.environ)
    if run is not None:
        output.say(f"muster: Slurm has requeued the job: resuming in {run.path}")
    return run


def _without_submission(arguments: Sequence[str]) -> list[str]:
    inside: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag in ("--slurm", "--detach", "--dry-run"):
            continue
        if flag not in ("--nodes", "--sbatch"):
            inside.append(word)
            continue
        if not equals:
            value = next(remaining, "")
        if flag == "--nodes" and ":" in value:  # MIN:MAX also applies inside the job
            inside += [flag, value]
    return inside
