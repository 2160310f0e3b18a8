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
highest answer. All ranks drop a request that not all have answered in time; the next signal makes a
new request.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import ExitCode
from torchmuster.launch.job import GRACE_VARIABLE
from torchmuster.launch.probes.process_group import group_store
from torchmuster.train.world import World

# Ctrl-C; the schedulers' stop signal; the schedulers' early warning.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
_WISHES = ("SIGUSR1",)  # a process that cannot follow these may continue
_LAST = 0  # no signal has this number
# In place of a request: training finished or failed.
_OVER, _FAILED = "over", "failed"
_NEVER = "never"  # in place of a step: not all ranks have answered
_VERY_LONG = timedelta(days=20)  # more milliseconds would not fit where torch puts them
# Threads answer within milliseconds, unless something blocks Python (a C extension). A process that
# was asked to stop is killed soon after; one that was only warned has time.
_USUAL_GRACE_S, _TO_ANSWER = 30.0, 0.8
_WISHES_ARE_ANSWERED_WITHIN_S = 6 * 3600.0
_LOOK_EVERY_S = 0.5
_LEAVE_WITHIN_S, _LEAVE_ALL_WITHIN_S = 2.0, 7.0
# One Ctrl-C may arrive twice, from the terminal and from torchrun.
_SECOND_AFTER_S = 0.5


def process_address() -> str:
    """Return an address that identifies this process: host and process id."""
    return f"{_host_id()} {os.getpid()}"


def process_died(address: str) -> bool:
    """Return whether a process of this host has exited; False for other hosts."""
    host, _, pid = address.rpartition(" ")
    return host == _host_id() and not psutil.pid_exists(int(pid))


def _host_id() -> str:
    """Return an id of this host and its PID namespace; containers may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


class SignalReader:
    """Reads signals in a thread: Python's own handlers do not run while a collective blocks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._handlers: dict[int, Any] = {}  # those before
        for name in names:
            number = getattr(signal, name, None)  # not every system has all of them
            if number is not None:
                self._handlers[number] = signal.signal(number, lambda number, frame: None)
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):
            # Else a signal to a forked process (a loader worker) would count as one to this process.
            os.register_at_fork(
                before=partial(self._mask, signal.SIG_BLOCK),
                after_in_parent=partial(self._mask, signal.SIG_UNBLOCK),
                after_in_child=self._leave,
            )

    def read(self, hear: Callable[[str], None]) -> None:
        """Call ``hear`` with the name of each signal until it is closed."""
        with self._ours:
            while True:
                for number in self._ours.recv(64):
                    if number == _LAST:
                        return
                    if number in self._handlers:
                        hear(signal.Signals(number).name)

    def close(self) -> None:
        """Restore the handlers before and stop reading."""
        self.put_back()
        self._theirs.send(bytes([_LAST]))  # a forked process may keep its end open
        self._theirs.close()

    def put_back(self) -> None:
        """Restore the signal handlers before."""
        if self._handlers:
            signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _mask(self, how: int) -> None:
        signal.pthread_sigmask(how, list(self._handlers))

    def _leave(self) -> None:
        numbers = list(self._handlers)
        self.put_back()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


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
        self._done = 0
        self._agreement: _Agreement | None = None  # set while a request is being handled
        self._round = 0  # number of the request, the same on all ranks
        self._origin = ""
        self._heard: dict[str, float] = {}
        self._last_word: str | None = None  # written on exit
        self._store: PrefixStore | None = None
        self._is_gone = False  # the store
        self._threads: list[threading.Thread] = []
        self._signals: SignalReader | None = None

    def due(self, step: int) -> bool:
        """Return whether to save and stop after ``step`` steps; call it after each step."""
        # In this order: a rank that sees no request here has already published its step.
        self._done = step
        agreement = self._agreement
        return agreement is not None and agreement.is_due(step)

    @property
    def demanded(self) -> bool:
        """Whether this rank received a signal that it must follow, unlike a scheduler's early warning."""
        return any(name not in _WISHES for name in self._heard)

    @property
    def origin(self) -> str:
        """The origin of the request: ``SIGUSR1 to rank 1``; empty without a request."""
        return self._origin

    # ---- opening and closing

    def __enter__(self) -> "StopRequest":
        if self._world.world_size > 1:
            store = PrefixStore("torchmuster/stop", group_store())
            visit = store.add(f"visits/{self._world.global_rank}", 1)
            self._store = PrefixStore(f"{visit}", store)
            self._store.set(f"address/{self._world.global_rank}", process_address())
            # A separate connection: the thread's wait would block all other uses of the store.
            self._start("stop-request", self._follow, _connected_anew(self._store))
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalReader(_SIGNALS)
            self._start("stop-signals", self._signals.read, self._signalled)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._signals is not None:
            self._signals.close()
            if isinstance(error, StoppedAtRequest):
                _ignore_wishes()  # it is exiting, and may be warned again
        self._last_word = _OVER if error is None else _FAILED
        # This lets the threads of all ranks exit, this one's too.
        self._put_request(self._last_word)
        # A rank with a new request needs this rank's answer, unless this rank has failed.
        patience_s = _LEAVE_ALL_WITHIN_S if error is None else _LEAVE_WITHIN_S
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self, name: str, work: Any, argument: Any) -> None:
        thread = threading.Thread(target=work, args=(argument,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- in the threads

    def _signalled(self, name: str) -> None:
        """Turn a signal into a request to all ranks."""
        now = time.monotonic()
        first = self._heard.setdefault(name, now)
        if name == "SIGINT" and now - first > _SECOND_AFTER_S:
            os._exit(ExitCode.INTERRUPTED)
        if first != now:
            return
        origin = f"{name} to rank {self._world.global_rank}"
        if self._store is None:
            self._agreement, self._origin = _Agreement(), origin
            self._agreement.settle(0)
        elif self._put_request(origin, by_a_thread=True) == _FAILED:
            self._cannot_follow()

    def _put_request(self, origin: str, *, by_a_thread: bool = False) -> str:
        """Write a request unless there is one; return the stored one."""
        if self._store is None or self._is_gone:
            return _FAILED
        try:
            # The training loop may be blocked on its own connection.
            store = _connected_anew(self._store) if by_a_thread else self._store
            return str(store.compare_set(f"{self._round}/request", "", origin).decode())
        except RuntimeError:  # torch's store errors
            return _FAILED

    def _follow(self, store: Store) -> None:
        """Handle requests until all ranks have answered one, or no more can come."""
        while True:
            agreement = _Agreement()
            try:
                answered = self._answer(PrefixStore(f"{self._round}", store), agreement)
            except RuntimeError:  # rank 0 has exited, and the store with it
                self._is_gone, answered = True, _NEVER
            if answered != _NEVER:
                return
            if self._last_word is None:
                self._cannot_follow()
            # Before the loop continues: later signals are new requests.
            self._heard.clear()
            self._round += 1
            self._agreement, self._origin = None, ""
            agreement.settle(None)
            if self._is_gone:
                return

    def _answer(self, store: PrefixStore, agreement: "_Agreement") -> str:
        """Wait for a request, answer it, and return the step after which all ranks stop."""
        if self._last_word is not None:
            store.compare_set("request", "", self._last_word)
        while not store.check(["request"]):
            with contextlib.suppress(torch.distributed.DistStoreError):  # timed out
                store.wait(["request"], _VERY_LONG)
        origin = store.get("request").decode()
        if origin in (_OVER, _FAILED):
            return origin
        self._agreement = agreement  # before publishing this rank's step: see due()
        store.set(f"done/{self._world.global_rank}", str(self._done))
        if store.add("answers", 1) == self._world.world_size:
            ranks = range(self._world.world_size)
            answers = store.multi_get([f"done/{rank}" for rank in ranks])
            store.compare_set("end", "", str(1 + max(int(answer) for answer in answers)))
        end = self._end_from(store, origin)
        if end != _NEVER:
            self._origin = origin
            agreement.settle(int(end))
        return end

    def _end_from(self, store: PrefixStore, origin: str) -> str:
        """Return the step after which all ranks stop, or ``never``; the ranks agree on both."""
        requested_s, pause_s = time.monotonic(), 0.002
        while not store.check(["end"]):
            if self._is_in_vain(store) or time.monotonic() > self._answered_until(
                requested_s, origin
            ):
                store.compare_set("end", "", _NEVER)
            else:  # torch warns about each store wait that times out
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_EVERY_S)
        return store.get("end").decode()

    def _is_in_vain(self, store: PrefixStore) -> bool:
        """Return whether this rank has failed, or a rank without an answer is known to be dead."""
        if self._last_word == _FAILED:
            return True
        first = self._world.global_rank - self._world.local_rank
        here = range(first, first + self._world.local_world_size)
        silent = [f"address/{rank}" for rank in here if not store.check([f"done/{rank}"])]
        visit = store.underlying_store
        addresses = [visit.get(key).decode() for key in silent if visit.check([key])]
        return any(process_died(address) for address in addresses)

    def _answered_until(self, requested_s: float, origin: str) -> float:
        """Return the deadline for answers; SIGTERM or Ctrl-C may follow an early warning."""
        grace_s = _demands_are_answered_within_s()
        deadlines = [
            heard_s + grace_s for name, heard_s in self._heard.items() if name not in _WISHES
        ]
        is_wish = origin.partition(" ")[0] in _WISHES
        patience_s = _WISHES_ARE_ANSWERED_WITHIN_S if is_wish else grace_s
        return min([requested_s + patience_s, *deadlines])

    def _cannot_follow(self) -> None:
        """Exit if this process was asked to stop: the others are gone, so nothing can be saved."""
        demands = [name for name in self._heard if name not in _WISHES]
        if demands:
            os._exit(128 + signal.Signals[demands[0]])


class _Agreement:
    """The ranks' agreement on one request: the step after which all stop, or that none does."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._end_at: int | None = None

    def settle(self, end_at: int | None) -> None:
        self._end_at = end_at
        self._settled.set()

    def is_due(self, step: int) -> bool:
        # It depends only on threads, which answer or time out.
        self._settled.wait()
        return self._end_at is not None and step >= self._end_at


def _demands_are_answered_within_s() -> float:
    """Return most of the time until this process is killed; the rest is for saving."""
    with contextlib.suppress(KeyError, ValueError):
        return _TO_ANSWER * float(os.environ[GRACE_VARIABLE])
    return _TO_ANSWER * _USUAL_GRACE_S


def _connected_anew(store: PrefixStore) -> Store:
    return cast(Store, cast(Any, store).clone())  # torch's type stubs lack it


def _ignore_wishes() -> None:
    for name in _WISHES:
        if hasattr(signal, name):
            signal.signal(signal.Signals[name], signal.SIG_IGN)
