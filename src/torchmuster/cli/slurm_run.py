"""``muster run --slurm``: submit a job that runs the same command."""

import os
import shlex
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


def submits(options: HostOptions) -> bool:
    """Return whether to submit a job: inside the job, the same command line starts the ranks."""
    return options.slurm and "SLURM_JOB_ID" not in os.environ


def submit(options: HostOptions, spec: JobSpec, script: Sequence[str] = ()) -> int:
    """Submit a job that runs this command line; ``--dry-run`` prints the sbatch command instead.

    The job is not followed: its number is printed, with the commands that show its output and cancel it.
    """
    from torchmuster.launch.schedulers.slurm.submit import log_of, sbatch_command, submit_job

    nodes = options.nodes or NodeCounts(least=1, most=1)
    typed = [word for word in options.command_line if word != "--dry-run"]
    sbatch = sbatch_command(
        spec,
        [*COMMAND, *typed, *script],
        options.runs,
        nodes=nodes.most + spec.spares,
        no_kill=spec.spares > 0 or nodes.least < nodes.most,
        sbatch_arguments=options.sbatch or [],
    )
    if isinstance(options, RunControl) and options.dry_run:
        output.print_text(shlex.join(sbatch))
        return ExitCode.GOOD
    job = submit_job(sbatch, run_root=options.runs)
    output.print_text(job)
    output.say(f"muster: submitted as job {job}; squeue --jobs={job} shows its state")
    output.say(f"muster: to see its output: tail -F {shlex.quote(str(log_of(job, options.runs)))}")
    output.say(f"muster: to cancel it:      scancel {job}")
    return ExitCode.GOOD


def transport_inside(spec: JobSpec) -> Transport | None:
    """Return the transport to the nodes of the current Slurm job; None if there is only this node."""
    from torchmuster.launch.schedulers.slurm import allocation

    here = allocation.allocation_here(os.environ)
    if here is None:
        return None
    allocation.check_counts(here, spec)
    # The host name of a container may differ from the name of the node.
    if here.nodes in ((socket.gethostname(),), (os.environ.get("SLURMD_NODENAME"),)):
        return None  # the job has only this node
    from torchmuster.launch.transports.srun import SrunTransport

    requeued = ""
    if here.restarts:
        requeued = f", requeued {plural(here.restarts, 'time')}"
    output.say(f"muster: in Slurm job {here.job} with {len(here.nodes)} nodes{requeued}")
    return SrunTransport(here, on_event=output.say_event)


def earlier_run(spec: JobSpec, root: Path) -> RunFolder | None:
    """Return the run to resume: that of a job which Slurm has requeued."""
    from torchmuster.launch.schedulers.slurm import allocation

    run = allocation.earlier_run(spec, root, os.environ)
    if run is not None:
        output.say(f"muster: Slurm has requeued the job: resuming in {run.path}")
    return run
