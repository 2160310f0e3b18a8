"""``muster run`` and ``muster train`` where a scheduler starts them on every node (launch/schedulers/node_group.py)."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import jobs, output
from torchmuster.cli.launch_options import RunControl
from torchmuster.cli.setting_options import settings_of
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder, refuse_foreign

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.node_group import NodeGroup


def take_group(options: RunControl) -> "NodeGroup | None":
    """Return the group that the environment describes, and remove it from there: ranks do not need its secret."""
    if options.dry_run:
        return None
    from torchmuster.launch.schedulers import node_group

    group = node_group.group_here(os.environ)
    if group is None:
        return None
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


def transport_to(group: "NodeGroup") -> Transport:
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


def run_folder(group: "NodeGroup", root: Path, spec: JobSpec) -> RunFolder:
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
