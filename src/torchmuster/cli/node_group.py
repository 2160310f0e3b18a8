"""``muster run`` and ``muster train`` where a scheduler starts them on every node (launch/schedulers/node_group.py)."""

import argparse
import os
import socket
from pathlib import Path

from torchmuster.cli import output
from torchmuster.errors import Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.schedulers import node_group
from torchmuster.launch.schedulers.node_group import NodeGroup
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder

# Pods may have to wait for nodes.
_JOIN_WITHIN_S = 1800.0


def take_group(options: argparse.Namespace) -> NodeGroup | None:
    """Return the group that the environment describes, and remove it from there: ranks do not need its secret."""
    if options.dry_run:
        return None
    group = node_group.group_here(os.environ)
    if group is None:
        return None
    for name in node_group.VARIABLES:
        os.environ.pop(name, None)
    if not any(word.startswith("--join-timeout") for word in options.words):
        options.join_timeout = _JOIN_WITHIN_S
    if options.detach:
        raise Impossible(
            "--detach does not work where a scheduler starts the command on every node",
            why="the scheduler would take the node for finished",
            fix="leave out --detach",
        )
    return group


def serve(group: NodeGroup, options: argparse.Namespace) -> int:
    """Run this node's ranks for the launcher, which is on another node; return the exit code."""
    from torchmuster.launch.node.group_member import serve_group

    return serve_group(group, options.runs, patience_s=options.join_timeout, say=_say)


def transport_to(group: NodeGroup) -> Transport:
    """Return the transport to this node and to the others of its group."""
    from torchmuster.launch.transports.local import LocalTransport

    if group.nodes == 1:
        return LocalTransport(socket.gethostname())
    from torchmuster.launch.network import interfaces
    from torchmuster.launch.transports.hosting import HostTransport
    from torchmuster.launch.transports.join.invitation import secret_from

    addresses = [one.address for one in interfaces.interface_candidates()]
    if not addresses:
        raise Impossible(
            "this node has no network address",
            why="the other nodes connect to the launcher",
            fix="ip address  # shows its addresses",
        )
    return HostTransport(
        socket.gethostname(),
        nodes=group.nodes,
        addresses=addresses,
        port=group.port,
        announce=False,
        on_event=_say,
        secret=secret_from(group.secret),
    )


def run_folder(group: NodeGroup, root: Path, name: str) -> RunFolder:
    """Return the folder of the run; the launcher of this group may have been started before."""
    run = group.earlier_run(root)
    before = run_state.read_job(run) if run is not None else None
    if run is None or before is None:
        return group.run_folder(root, name)
    state = run_state.read_state(run)
    said = state.headline if state is not None and not state.active else ""
    words = f"the launcher on {before.launcher.host} is gone" + (f": {said}" if said else "")
    _say(f"resuming in {run.path}: {words}")
    run_state.log_event(run, run_state.RESTART, headline=words)
    return run


def ended_before(group: NodeGroup, root: Path) -> int | None:
    """Return the exit code of a run that ended for good before this node was started again."""
    code = group.ended(root)
    if code is not None:
        _say(f"run {group.run_id} has ended already, with exit code {code}")
    return code


def _say(words: str) -> None:
    for line in words.splitlines():
        output.say(f"muster: {line}")
