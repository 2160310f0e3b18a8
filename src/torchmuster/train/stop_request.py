"""Stop requests: a signal to any rank makes all ranks stop after the same step.

::

    with StopRequest(world) as stop:
        for step in steps:
            train(step)
            if stop.due(step):      # the same answer on every rank
                save()
                raise StoppedAtRequest(step, stop.origin)

No collective is needed, and nothing is exchanged without a request. A thread of each rank waits at
the rendezvous store. The rank that gets the signal writes a request there; every thread answers
with the number of steps that its loop has done; all ranks stop after the step that follows the
highest answer. If a rank died before it answered, the others wait until the launcher ends them.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, cast

from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import ExitCode
from torchmuster.launch.probes.process_group import group_store
from torchmuster.train.world import World

# Ctrl-C; the schedulers' stop signal; the schedulers' early warning.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
_WARNING = "SIGUSR1"  # a process that cannot save may continue
_LAST = 0  # no signal has this number
# In place of a request: training finished or failed.
_OVER, _FAILED = "over", "failed"
_VERY_LONG = timedelta(days=20)  # more milliseconds would not fit where torch puts them
_LEAVE_WITHIN_S = 7.0  # other ranks may need this rank's answer
# One Ctrl-C may arrive twice, from the terminal and from torchrun.
_SECOND_AFTER_S = 0.5


class SignalReader:
    """Reads signals in a thread: Python's own handlers do not run while a collective blocks."""

    current: ClassVar["SignalReader | None"] = None

    def __init__(self, hear: Callable[[str], None]) -> None:
        """Call ``hear`` with the name of each signal, in a thread, until :meth:`close`."""
        self._hear = hear
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._before: dict[int, Any] = {}  # handlers
        for name in _SIGNALS:
            number = getattr(signal, name, None)  # not every system has all of them
            if number is not None:
                self._before[number] = signal.signal(number, lambda number, frame: None)
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        SignalReader.current = self
        self.thread = threading.Thread(target=self._read, name="stop-signals", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with self._ours:
            while True:
                for number in self._ours.recv(64):
                    if number == _LAST:
                        return
                    if number in self._before:
                        self._hear(signal.Signals(number).name)

    def mask(self, how: int) -> None:
        """Block or unblock the signals in this thread."""
        signal.pthread_sigmask(how, list(self._before))

    def restore(self) -> None:
        """Restore the signal handlers before."""
        SignalReader.current = None
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def close(self) -> None:
        """Restore the handlers and stop reading."""
        self.restore()
        self._theirs.send(bytes([_LAST]))  # a forked process may keep its end open
        self._theirs.close()


def _before_fork() -> None:
    if SignalReader.current is not None:
        SignalReader.current.mask(signal.SIG_BLOCK)


def _after_fork() -> None:
    if SignalReader.current is not None:
        SignalReader.current.mask(signal.SIG_UNBLOCK)


def _in_forked_process() -> None:
    reader = SignalReader.current
    if reader is not None:
        reader.restore()
        reader.mask(signal.SIG_UNBLOCK)


# Else a signal to a forked process (a loader worker) would count as one to this process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_process
    )


class StoppedAtRequest(SystemExit):
    """Exits the process with code 75, which means: checkpointed, rerun to resume.

    It is not an error, and Python prints nothing. The launcher reads ``what``, ``why`` and ``fix``.
    """

    def __init__(self, step: int, origin: str) -> None:
        super().__init__(int(ExitCode.SAVED))
        self.step = step
        self.what = f"saved at step {step} after a stop request ({origin})"
        self.why = origin
        self.fix = "rerun to resume from there"


class StopRequest:
    """Receives signals and other ranks' stop requests while open; all ranks open it equally often.

    It receives signals only if the main thread opens it. SIGTERM and SIGUSR1 may arrive several
    times, as schedulers send them to every process; a second Ctrl-C exits at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._done = 0  # steps
        self._is_requested = False
        self._is_agreed = threading.Event()
        self._end_at = sys.maxsize  # the step after which all ranks stop
        self._origin = ""
        self._interrupted_s: float | None = None  # the time of the first Ctrl-C
        self._store: PrefixStore | None = None
        self._signals: SignalReader | None = None
        self._thread: threading.Thread | None = None

    def due(self, step: int) -> bool:
        """Return whether to save and stop after ``step`` steps; call it after each step."""
        # In this order: a rank that sees no request here has already published its step.
        self._done = step
        if not self._is_requested:
            return False
        self._is_agreed.wait()  # for the other ranks' threads, which answer at once
        return step >= self._end_at

    @property
    def origin(self) -> str:
        """The origin of the request: ``SIGUSR1 to rank 1``; empty without a request."""
        return self._origin

    def __enter__(self) -> "StopRequest":
        rank = self._world.global_rank
        if self._world.world_size > 1:
            store = PrefixStore("torchmuster/stop", group_store())
            visit = store.add(f"visits/{rank}", 1)
            self._store = PrefixStore(f"{visit}", store)
            self._thread = threading.Thread(
                target=self._follow, args=(_cloned(self._store),), name="stop-request", daemon=True
            )
            self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalReader(self._signalled)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._signals is not None:
            self._signals.close()
            if isinstance(error, StoppedAtRequest) and hasattr(signal, _WARNING):
                # It is exiting, and may be warned again.
                signal.signal(signal.Signals[_WARNING], signal.SIG_IGN)
            self._signals.thread.join(_LEAVE_WITHIN_S)
        if self._thread is not None:
            # This lets the threads of all ranks exit, this one's too.
            self._request(_OVER if error is None else _FAILED)
            if error is None:
                self._thread.join(_LEAVE_WITHIN_S)

    # ---- in the threads

    def _signalled(self, name: str) -> None:
        """Turn a signal into a request to all ranks."""
        if name == "SIGINT":
            now_s = time.monotonic()
            if self._interrupted_s is None:
                self._interrupted_s = now_s
            if now_s - self._interrupted_s > _SECOND_AFTER_S:
                os._exit(ExitCode.INTERRUPTED)
        origin = f"{name} to rank {self._world.global_rank}"
        if self._thread is None:
            self._origin = self._origin or origin
            self._agree_on(0)
        elif self._request(origin) == _FAILED and name != _WARNING:
            os._exit(128 + signal.Signals[name])  # another rank is gone, so nothing can be saved

    def _request(self, origin: str) -> str:
        """Write a request unless there is one; return the stored one."""
        assert self._store is not None
        try:
            # The training loop may be blocked on its own connection.
            return str(_cloned(self._store).compare_set("request", "", origin).decode())
        except RuntimeError:  # rank 0 has exited, and the store with it
            return _FAILED

    def _follow(self, store: Store) -> None:
        """Wait for a request, answer it, and learn the step after which all ranks stop."""
        try:
            store.wait(["request"], _VERY_LONG)
            origin = store.get("request").decode()
            if origin in (_OVER, _FAILED):
                return
            self._is_requested = True  # before publishing this rank's step: see due()
            store.set(f"done/{self._world.global_rank}", str(self._done))
            ranks = range(self._world.world_size)
            if store.add("answers", 1) == len(ranks):
                answers = store.multi_get([f"done/{rank}" for rank in ranks])
                store.set("end", str(1 + max(map(int, answers))))
            store.wait(["end"], _VERY_LONG)
            self._origin = origin
            self._agree_on(int(store.get("end")))
        except RuntimeError:  # the store is gone: training continues until it needs the other ranks
            self._is_agreed.set()

    def _agree_on(self, end_at: int) -> None:
        self._end_at = end_at
        self._is_requested = True
        self._is_agreed.set()


def _cloned(store: PrefixStore) -> Store:
    """Return a connection of its own: a wait blocks all other uses of a connection."""
    return cast(Store, cast(Any, store).clone())  # torch's type stubs lack it
