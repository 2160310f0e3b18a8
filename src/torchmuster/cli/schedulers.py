"""``muster run``, ``train`` and ``check`` under schedulers: Slurm, and those that start the command on every node.

Of Slurm: submit a job, use the nodes of the current one, resume in a requeued one. Of others: launch/schedulers/node_group.py.
"""

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output
from torchmuster.cli.launch_options import HostOptions, RunControl
from torchmuster.cli.setting_options import settings_of
from torchmuster.errors import ExitCode, Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder, refuse_foreign
from torchmuster.units import plural

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.node_group import NodeGroup

# Of schedulers that start the command on every node (launch/schedulers/node_group.py)
_GROUP = {"TORCHMUSTER_NNODES", "TORCHMUSTER_NODE_RANK"}
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


def take_group(options: RunControl) -> "NodeGroup | None":
    """Return the group that the environment describes, and remove it from there: ranks do not need its secret."""
    if options.dry_run or os.environ.keys().isdisjoint(_GROUP):
        return None
    from torchmuster.launch.schedulers import node_group

    group = node_group.group_here(os.environ)
    if group is None:
        return None
    if group.node_rank > 0:
        from torchmuster.launch.node import supervisor

        supervisor.continue_supervised()  # it needs the variables once more
    for name in node_group.VARIABLES:
        os.environ.pop(name, None)
    if options.detach:
        raise Impossible(
            "--detach does not work where a scheduler starts the command on every node",
            why="the scheduler would take the node for finished",
            fix="leave out --detach",
        )
    return group


def code_of_member(group: "NodeGroup", options: RunControl) -> int | None:
    """Run this node's ranks for a launcher on another node, and return the exit code.

    None if this node is the launcher, and the run has not ended for good before.
    """
    code = group.ended(options.runs)
    if code is not None:
        output.say_event(f"run {group.run_id} has ended already, with exit code {code}")
        return code
    if group.node_rank == 0:
        return None
    from torchmuster.launch.schedulers.group_member import serve_group

    timeout = settings_of(options).settings.launch.join_timeout
    # Pods may have to wait for nodes.
    patience_s = jobs.PATIENT_JOIN_S if timeout is None else jobs.seconds(timeout)
    return serve_group(group, options.runs, patience_s=patience_s, say=output.say_event)


def transport_to_group(group: "NodeGroup") -> Transport:
    """Return the transport to this node and to the others of its group."""
    from torchmuster.launch.transports.local import LocalTransport

    local = LocalTransport(socket.gethostname())
    if group.nodes == 1:
        return local  # and listen on no port
    from torchmuster.launch.transports.join.transport import JoinTransport

    return JoinTransport(
        local=local,
        count=group.nodes - 1,
        ports=[group.port],
        on_event=output.say_event,
        key=group.key(),
    )


def folder_of_group(group: "NodeGroup", root: Path, spec: JobSpec) -> RunFolder:
    """Return the folder of the run, which an earlier launcher of this group may have started."""
    run = group.earlier_run(root)
    before = run_state.read_job(run) if run is not None else None
    if run is None or before is None:
        return group.run_folder(root, spec.name)
    refuse_foreign(run, "resume")
    state = run_state.read_state(run)
    if state is not None and state.active and before.job_uid != group.job_uid:
        raise NotNow(
            f"run {run.id} in {root} is active in another job",
            why=f"its launcher is on {before.launcher.host}",
            fix="stop that job, or give this one another name: --name NAME",
        )
    headline = f"the launcher on {before.launcher.host} is gone"
    if state is not None and not state.active:
        headline += f": {state.headline}"
    output.say_event(f"resuming in {run.path}: {headline}")
    what = f"{headline}; restarted"
    run_state.log_event(run, run_state.RESTART, what=what, headline=headline)
    return run
