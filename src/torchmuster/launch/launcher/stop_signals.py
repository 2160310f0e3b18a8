"""The signals that the launcher gets while a run lasts, as requests to its task, and the run's time limit."""

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torchmuster.errors import ExitCode
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

logger = logging.getLogger(__name__)

# Schedulers signal every process of a job, and a shell whose terminal closes hangs up its jobs after the system
# did, so one request may arrive more than once.
_SAME_REQUEST_S = 0.5
_REMIND_AFTER_S = 2.0


class StopSignal(NamedTuple):
    """Where a request to stop came from, and the exit code after it."""

    origin: str
    exit_code: ExitCode


STOP_SIGNALS = {
    "SIGINT": StopSignal("Ctrl-C", ExitCode.INTERRUPTED),
    "SIGTERM": StopSignal("SIGTERM to the launcher", ExitCode.TERMINATED),
    "SIGHUP": StopSignal("terminal closed", ExitCode.TERMINATED),
}


class Stoppable(Protocol):
    """What the signals are passed to."""

    @property
    def stop(self) -> Callable[[str], None]:
        """Request a stop and give its origin; a second request stops without a grace period."""

    @property
    def pass_on(self) -> Callable[[str], None]:
        """Pass a signal on to every rank."""


class StopSignals:
    """The signals that arrive while a run lasts, as requests to its task, and its time limit.

    Use as a context: at its end, every signal does again what it did before.
    """

    def __init__(self, spec: JobSpec, run: RunFolder, task: Stoppable) -> None:
        self._spec = spec
        self._run = run
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._last_s = -math.inf
        self._reminder: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._handled: dict[int, object] = {}  # the signals, and what they did before
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
        self._handle("SIGUSR2", self.warn, "SIGUSR2")
        self._handle("SIGTSTP", self._refuse_to_suspend)
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
            signal.signal(number, before)  # type: ignore[arg-type]

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
        run_state.log_event(self._run, event, what=f"stop requested ({origin})")
        logger.info(text)
        self._task.stop(origin)

    def _refuse_to_suspend(self) -> None:
        logger.info(
            "a run cannot be suspended; to free the terminal use --detach and muster logs -f"
        )
