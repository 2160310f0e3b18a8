"""A stop request to the launcher: its origin, what was saved because of it, and which ranks had to be killed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import script_checkpoints
from torchmuster.launch.launcher import node_handle
from torchmuster.launch.launcher.console import rank_text
from torchmuster.launch.launcher.node_handle import NodeHandle
from torchmuster.launch.launcher.silence import activity_text

RANKS_KILLED = "ranks-killed"


@dataclass(frozen=True, kw_only=True)
class StopCause:
    """Why a run is being stopped: ``origin`` is ``SIGTERM to the launcher``, ``Ctrl-C``, …; and since when."""

    origin: str
    at_unix_s: float = field(default_factory=time.time)


def saved_after_request(nodes: Sequence[NodeHandle], cause: StopCause | None, metrics: Path) -> str:
    """Return what was saved because of a stop request; "" if no checkpoint is known to have been saved.

    A run that saved exits with code 75. Ranks of ``muster train`` exit with that code when they have saved; for other
    scripts, a complete checkpoint that was recorded after the request counts.
    """
    origin = "" if cause is None else cause.origin
    if told := node_handle.trouble_text(nodes, origin=origin):
        return told
    if cause is not None and script_checkpoints.saved_after(metrics, cause.at_unix_s):
        return f"saved a checkpoint after a stop request ({origin})"
    return ""


@dataclass(frozen=True, kw_only=True)
class KilledRanks:
    """The ranks that had to be killed after a stop request; ``at_once``: because it was repeated."""

    ranks: tuple[int, ...]
    finding: Finding
    at_once: bool = False


def killed_after_request(
    nodes: Sequence[NodeHandle], *, grace_s: float, at_once: bool
) -> KilledRanks | None:
    """Return the ranks that had not stopped when the grace period was over; None if there are none."""
    ranks = tuple(sorted(rank for node in nodes if node.ended for rank in node.ended.killed))
    if not ranks:
        return None
    heartbeats = [one for node in nodes for one in node.heartbeats]
    finding = killed_finding(ranks, heartbeats, grace_s=grace_s, at_once=at_once)
    return KilledRanks(ranks=ranks, finding=finding, at_once=at_once)


def waiting_text(nodes: Sequence[NodeHandle], now_s: float) -> str:
    """Return ``waiting for ranks 0-1 to stop: 24 s left``; "" if all have stopped."""
    slow = [node for node in nodes if not node.ended and not node.lost]
    if not slow:
        return ""
    told = [(node.stopping, node.stopping_s) for node in slow if node.stopping is not None]
    ranks = [rank for stopping, _ in told for rank in stopping.ranks]
    if not ranks:  # they have stopped, or their hosts have not reported yet
        return f"waiting for {', '.join(node.name for node in slow[:8])} to stop"
    left_s = max(stopping.left_s - (now_s - at_s) for stopping, at_s in told)
    doing = activity_text(one for node in slow for one in node.heartbeats if one.rank in ranks)
    words = f"waiting for {rank_text(ranks)} to stop: {max(0.0, left_s):.0f} s left"
    return f"{words} ({doing})" if doing else words


def killed_finding(
    ranks: Sequence[int], heartbeats: Sequence[Heartbeat], *, grace_s: float, at_once: bool
) -> Finding:
    """Return the finding that names the ranks that had to be killed; ``at_once``: the user requested it."""
    who, it_was = rank_text(ranks), "was" if len(ranks) == 1 else "were"
    when = f"did not exit within {grace_s:g} s after SIGTERM and {it_was} killed"
    if at_once:
        when = f"{it_was} killed because of the second stop request"
    doing = activity_text((one for one in heartbeats if one.rank in ranks), together=f"{who}: ")
    return Finding(
        name=RANKS_KILLED,
        status=Status.WARNING,
        what=f"{who} {when}",
        why="\n".join(["unsaved work is lost", *([f"last seen: {doing}"] if doing else [])]),
        fix=""
        if at_once
        else "give them more time: --grace 2m; under Slurm also --sbatch --signal=B:USR1@300, in a Kubernetes pod also a longer "
        "terminationGracePeriodSeconds",
    )
