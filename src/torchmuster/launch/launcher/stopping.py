"""Stop requests to the launcher: the signals, what was saved because of them, and which ranks had to be killed."""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, name_several, rank_text

logger = logging.getLogger(__name__)

# A rank that saved may still be exiting when the remaining ranks get another stop signal.
_ENDED = {0, -2, -9, -15}
_WARNED = -getattr(signal, "SIGUSR1", 10)
_SAVED = "saved after a stop request"
_NOTHING_NEW = "stopped on request with nothing new to save"
# Schedulers signal every process of a job, and a shell whose terminal closes hangs up its jobs after the system
# did, so one request may arrive more than once.
_SAME_REQUEST_S = 0.5
_REMIND_AFTER_S = 2.0


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


def agent_stop_origin(hosts: Sequence[ConnectedHost]) -> str | None:
    """Return the origin of a stop request that a scheduler sent to a node agent."""
    for host in hosts:
        if host.ended and host.ended.stop_signal:
            return f"{host.ended.stop_signal} to the node agent on {host.name}"
    return None


def saved_by_ranks(
    hosts: Sequence[ConnectedHost], *, warned: bool = False, origin: str | None = None
) -> Saved | None:
    """Return what the ranks saved, by their exit codes; None if a host has no rank that saved, or one that failed.

    If they can save and were ``warned``, ranks killed by the warning had not started or were finished. ``origin`` is
    the origin of the request, if it is known: a rank knows only that it got a signal.
    """
    from torchmuster.launch.history import known_failures

    requested = {int(ExitCode.SAVED), _WARNED} if warned else {int(ExitCode.SAVED)}
    saved: list[protocol.Failure] = []
    for host in hosts:
        failures = host.ended.failures if host.ended else ()
        codes = {known_failures.by_signal(failure.exit_code) for failure in failures}
        if not codes & requested or codes - requested - _ENDED:
            return None
        saved += [failure for failure in failures if failure.exit_code == ExitCode.SAVED]
    if not hosts:
        return None
    if not saved:
        return Saved(text=_NOTHING_NEW, is_new=False)
    first = next((failure for failure in saved if failure.what), saved[0])
    origin = origin or agent_stop_origin(hosts)
    if origin is None:
        return Saved(text=first.what or _SAVED)
    return Saved(text=f"{first.what.removesuffix(f' ({first.why})') or _SAVED} ({origin})")


def saved_after_request(
    hosts: Sequence[ConnectedHost], cause: StopCause | None, metrics: Path
) -> Saved | None:
    """Return what was saved because of a stop request; None if no checkpoint is known to have been saved.

    A run that saved exits with code 75. Ranks of ``muster train`` exit with that code when they have saved; for other
    scripts, a complete checkpoint that was recorded after the request counts.
    """
    from torchmuster.launch.history import script_checkpoints

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
    finding = Finding(
        name=run_state.RANKS_KILLED,
        status=Status.WARNING,
        what=f"{rank_text(ranks)} did not exit within {grace_s:g} s after SIGTERM: killed",
        why="unsaved work is lost",
        fix="give them more time: --set launch.grace=2m; under Slurm also --sbatch --signal=B:USR1@300, in a Kubernetes pod "
        "also a longer terminationGracePeriodSeconds",
    )
    if at_once:
        what = f"{rank_text(ranks)} did not exit before the second stop request: killed"
        finding = replace(finding, what=what, fix="")
    return KilledRanks(ranks=tuple(ranks), finding=finding, at_once=at_once)


def waiting_text(hosts: Sequence[ConnectedHost], now_s: float) -> str:
    """Return ``waiting for ranks 0-1 to stop: 24 s left``; "" if all have stopped."""
    slow = [host for host in hosts if not host.ended and not host.is_lost]
    ranks: list[int] = []
    left_s = 0.0
    for host in slow:
        if host.stopping is not None:
            ranks += host.stopping.ranks
            left_s = max(left_s, host.stopping.left_s - (now_s - host.stopping_s))
    if ranks:
        return f"waiting for {rank_text(ranks)} to stop: {left_s:.0f} s left"
    if slow:  # the ranks have stopped, or their hosts have not reported yet
        return f"waiting for {name_several([host.name for host in slow])} to stop"
    return ""


# ---- signals


class StopSignal(NamedTuple):
    """Where a request to stop came from, and the exit code after it."""

    origin: str
    exit_code: ExitCode


STOP_SIGNALS = {
    "SIGINT": StopSignal("Ctrl-C", ExitCode.INTERRUPTED),
    "SIGTERM": StopSignal("SIGTERM to the launcher", ExitCode.TERMINATED),
    "SIGHUP": StopSignal("terminal closed", ExitCode.TERMINATED),
}


class Task(Protocol):
    """What is done with the hosts: a run (``run.py``) or a check of the group."""

    spec: JobSpec
    run_folder: RunFolder
    token: str

    def stop(self, origin: str) -> None:
        """Request a stop, whose origin is given; a second request stops without a grace period."""

    def pass_on(self, name: str) -> None:
        """Pass a scheduler's warning on to every rank."""


class StopSignals:
    """The signals that arrive while a run lasts, as requests to its task, and its time limit.

    Use as a context: at its end, every signal does again what it did before.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._spec = task.spec
        self._loop = asyncio.get_running_loop()
        self._last_s = -math.inf
        self._reminder: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._handled: dict[int, Any] = {}  # the signals, and what they did before
        self.stop_signals: list[str] = []  # requests to stop
        self.is_warned = False

    @property
    def cause(self) -> StopSignal:
        """What the first request was."""
        return STOP_SIGNALS[self.stop_signals[0] if self.stop_signals else "SIGTERM"]

    def __enter__(self) -> "StopSignals":
        self._handle("SIGINT", self.stop, "SIGINT")
        self._handle("SIGTERM", self.stop, "SIGTERM")
        self._handle("SIGUSR1", self.warn, "SIGUSR1")
        # With nohup or --detach, a hangup does nothing.
        if signal.getsignal(getattr(signal, "SIGHUP", signal.SIGTERM)) is not signal.SIG_IGN:
            self._handle("SIGHUP", self.stop, "SIGHUP")
        return self

    def __exit__(self, *error: object) -> None:
        for timer in (self._reminder, self._limit):
            if timer is not None:
                timer.cancel()
        for number, before in self._handled.items():
            self._loop.remove_signal_handler(number)
            if before is not None:  # None: a handler of C code, of a program that embeds Python
                signal.signal(number, before)

    def _handle(self, name: str, action: Callable[..., None], *arguments: str) -> None:
        with contextlib.suppress(AttributeError, NotImplementedError):  # Windows
            number = getattr(signal, name)
            before = signal.getsignal(number)
            self._loop.add_signal_handler(number, action, *arguments)
            self._handled[number] = before

    def stop(self, name: str) -> None:
        """Ask the ranks to stop; a second request kills them."""
        again_s = self._loop.time() - self._last_s
        self._last_s = self._loop.time()
        if again_s <= _SAME_REQUEST_S and name != "SIGINT":
            return
        origin = STOP_SIGNALS[name].origin
        within = f"within {self._spec.limits.grace_s:g} s"
        text = f"stop requested ({origin}): stopping all ranks {within} (repeat to kill them immediately)"
        if self.stop_signals:
            text = f"stop requested again ({origin}): killing all ranks"
        self._request_stop(name, origin, "stop-requested", text)

    def warn(self, name: str) -> None:
        """Pass a scheduler's warning on, again and again: ranks that are still starting miss the first one."""
        self.is_warned = True
        self._task.pass_on(name)
        if self._spec.checkpoints is not None:
            if self._reminder is not None:
                self._reminder.cancel()
            self._reminder = self._loop.call_later(_REMIND_AFTER_S, self.warn, name)

    def begin_time_limit(self) -> None:
        """Let the time limit begin, once."""
        if self._spec.limits.time_s is not None and self._limit is None:
            self._limit = self._loop.call_later(self._spec.limits.time_s, self._end_at_limit)

    def _end_at_limit(self) -> None:
        origin = f"time limit of {format_seconds(self._spec.limits.time_s or 0.0)}"
        grace_s = self._spec.limits.grace_s
        text = f"{origin} reached: stopping all ranks within {grace_s:g} s"
        self._request_stop("SIGTERM", origin, "time-limit", text)

    def _request_stop(self, name: str, origin: str, event: str, text: str) -> None:
        self.stop_signals.append(name)
        run_state.log_event(self._task.run_folder, event, what=f"stop requested ({origin})")
        logger.info(text)
        self._task.stop(origin)
