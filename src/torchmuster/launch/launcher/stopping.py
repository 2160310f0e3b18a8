"""A stop request to the launcher: its origin, what was saved because of it, and which ranks had to be killed."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import known_failures, script_checkpoints
from torchmuster.launch.launcher.console import rank_text
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.silence import activity_text

RANKS_KILLED = "ranks-killed"
# A rank that saved may still be exiting when the remaining ranks get another stop signal.
_ENDED = (0, -2, -9, -15)
_WARNED = -getattr(signal, "SIGUSR1", 10)
_SAVED = "saved after a stop request"
_NOTHING_NEW = "stopped on request with nothing new to save"


@dataclass(frozen=True, kw_only=True)
class StopCause:
    """Why a run is being stopped: ``origin`` is ``SIGTERM to the launcher``, ``Ctrl-C``, …; and since when."""

    origin: str
    at_unix_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The ranks ended because they were asked to; ``is_new``: they saved, rather than had nothing new to save."""

    text: str
    is_new: bool = True


def asked_elsewhere(hosts: Sequence[ConnectedHost]) -> str | None:
    """Return the origin of a stop request that a scheduler sent to a node agent."""
    for host in hosts:
        if host.ended and host.ended.asked:
            return f"{host.ended.asked} to the node agent on {host.name}"
    return None


def saved_by_ranks(
    hosts: Sequence[ConnectedHost], *, warned: bool = False, origin: str | None = None
) -> Saved | None:
    """Return what the ranks saved, by their exit codes; None if a host has no rank that saved, or one that failed.

    If they can save and were ``warned``, ranks killed by the warning had not started or were finished. ``origin`` is
    the origin of the request, if it is known: a rank knows only that it got a signal.
    """
    asked = {int(ExitCode.SAVED)}
    if warned:
        asked.add(_WARNED)
    failures: list[protocol.Failure] = []
    for host in hosts:
        if host.ended is None or not any(_code(f) in asked for f in host.ended.failures):
            return None
        failures += host.ended.failures
    if not failures or any(_code(f) not in (*asked, *_ENDED) for f in failures):
        return None
    saved = [failure for failure in failures if failure.exit_code == ExitCode.SAVED]
    if not saved:
        return Saved(text=_NOTHING_NEW, is_new=False)
    first = next((failure for failure in saved if failure.what), saved[0])
    origin = origin or asked_elsewhere(hosts)
    if origin is None:
        return Saved(text=first.what or _SAVED)
    return Saved(text=f"{first.what.removesuffix(f' ({first.why})') or _SAVED} ({origin})")


def _code(failure: protocol.Failure) -> int:
    return known_failures.by_signal(failure.exit_code)


def saved_after_request(
    hosts: Sequence[ConnectedHost], cause: StopCause | None, metrics: Path
) -> Saved | None:
    """Return what was saved because of a stop request; None if no checkpoint is known to have been saved.

    A run that saved exits with code 75. Ranks of ``muster train`` exit with that code when they have saved; for other
    scripts, a complete checkpoint that was recorded after the request counts.
    """
    if cause is None:
        return saved_by_ranks(hosts)
    by_ranks = saved_by_ranks(hosts, origin=cause.origin)
    if by_ranks is None and script_checkpoints.saved_after(metrics, cause.at_unix_s):
        return Saved(text=f"saved a checkpoint after a stop request ({cause.origin})")
    return by_ranks


@dataclass(frozen=True, kw_only=True)
class KilledRanks:
    """The ranks that had to be killed after a stop request; ``at_once``: because it was repeated."""

    ranks: tuple[int, ...]
    finding: Finding
    at_once: bool = False


def killed_after_request(
    hosts: Sequence[ConnectedHost], *, grace_s: float, at_once: bool
) -> KilledRanks | None:
    """Return the ranks that had not stopped when the grace period was over; None if there are none."""
    ranks = sorted(rank for host in hosts if host.ended for rank in host.ended.killed)
    if not ranks:
        return None
    heartbeats = [heartbeat for host in hosts for heartbeat in host.heartbeats]
    finding = killed_finding(ranks, heartbeats, grace_s=grace_s, at_once=at_once)
    return KilledRanks(ranks=tuple(ranks), finding=finding, at_once=at_once)


def waiting_text(hosts: Sequence[ConnectedHost], now_s: float) -> str:
    """Return ``waiting for ranks 0-1 to stop: 24 s left``; "" if all have stopped."""
    slow = [host for host in hosts if not host.ended and not host.is_lost]
    if not slow:
        return ""
    ranks: list[int] = []
    left_s = 0.0
    for host in slow:
        if host.stopping is not None:
            ranks += host.stopping.ranks
            left_s = max(left_s, host.stopping.left_s - (now_s - host.stopping_s))
    if not ranks:  # they have stopped, or their hosts have not reported yet
        return f"waiting for {', '.join(host.name for host in slow[:8])} to stop"
    doing = activity_text(h for host in slow for h in host.heartbeats if h.rank in ranks)
    text = f"waiting for {rank_text(ranks)} to stop: {left_s:.0f} s left"
    return f"{text} ({doing})" if doing else text


def killed_finding(
    ranks: Sequence[int], heartbeats: Sequence[Heartbeat], *, grace_s: float, at_once: bool
) -> Finding:
    """Return the finding that names the ranks that had to be killed; ``at_once``: the user requested it."""
    who, it_was = rank_text(ranks), "was" if len(ranks) == 1 else "were"
    when = f"did not exit within {grace_s:g} s after SIGTERM and {it_was} killed"
    fix = (
        "give them more time: --set launch.grace=2m; under Slurm also --sbatch --signal=B:USR1@300, in a Kubernetes pod also a longer "
        "terminationGracePeriodSeconds"
    )
    if at_once:
        when = f"{it_was} killed because of the second stop request"
        fix = ""
    why = "unsaved work is lost"
    doing = activity_text((h for h in heartbeats if h.rank in ranks), together=f"{who}: ")
    if doing:
        why += f"\nlast seen: {doing}"
    return Finding(name=RANKS_KILLED, status=Status.WARNING, what=f"{who} {when}", why=why, fix=fix)
