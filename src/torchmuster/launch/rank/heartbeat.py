"""The thread in each rank that writes a heartbeat once a second.

It only observes: it uses no signals, takes no locks of the script, prints nothing, and its errors never reach the
script. The script cannot see or join this thread, and it is paused while the process forks. Standard library
only, as it runs with whatever is installed on the host.
"""

import _thread
import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmuster.launch.rank import collectives, stack

_EVERY_S = 1.0
_STILL_AFTER_S = 3.0
_STILL_WITHOUT_ONE_AFTER_S = 6.0  # many steps take some seconds
_STOP_WITHIN_S = 1.0
# Requests the stacks of a rank in which Python cannot run. Chosen to be unused: glibc uses the first real-time
# signals, and users the low numbers.
STACKS_SIGNAL = signal.SIGRTMAX - 2 if sys.platform == "linux" else None
# The module in which the trainer reports its progress, if loaded (train/progress.py).
_PROGRESS = "torchmuster.train.progress"
# The module that records other scripts.
_RECORDER = "torchmuster.integrations.recorder"
# The signals by which a script may be asked to save and stop.
_STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def start_heartbeat(rank: int, records: Path) -> None:
    """Start writing heartbeats; parts that are unavailable here are skipped."""
    with contextlib.suppress(Exception):
        _register_stacks(records / f"rank-{rank}.faults.txt")
        writer = HeartbeatWriter(rank, records)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=writer.pause, after_in_parent=writer.start)
        # At shutdown Python unwinds threads that still run, on which torch's C++ code aborts. Registered before the
        # script's own handlers, so it runs after them.
        atexit.register(writer.end)
        writer.start()


def _register_stacks(path: Path) -> None:
    if STACKS_SIGNAL is not None and signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        # Kept open while the process lives: a signal handler cannot open it.
        faulthandler.register(STACKS_SIGNAL, path.open("w"), all_threads=True)


class HeartbeatWriter:
    """Writes the heartbeats of one rank."""

    def __init__(self, rank: int, records: Path) -> None:
        self._rank = rank
        self._path = records / f"rank-{rank}.heartbeat.json"
        self._stacks_request = records / f"rank-{rank}.examine"
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._beat = self._moves = 0
        self._seen: tuple[object, ...] = ()
        self._moved_s = time.monotonic()
        self._begun: dict[str, int] = {}
        self._waits: list[dict[str, Any]] = []
        self._has_read = False
        self._reading = False  # the flight recorder is being read
        self._delegates = False  # the main thread waits for another thread
        self._worker: int | None = None  # which one, according to its collectives
        self._turn = _thread.allocate_lock()  # several threads may fork at once
        self._running: tuple[_thread.LockType, _thread.LockType] | None = None

    def start(self) -> None:
        """Start the thread; not with ``threading``, whose threads a script may count and join."""
        if os.getpid() != self._pid:  # a child that forks has no heartbeat
            return
        with contextlib.suppress(Exception), self._turn:
            if self._running is None:
                wake, ended = _thread.allocate_lock(), _thread.allocate_lock()
                wake.acquire()
                ended.acquire()
                _thread.start_new_thread(self._run, (wake, ended))
                self._running = (wake, ended)

    def pause(self) -> None:
        """Stop the thread, so that a fork does not copy it in the middle of its work."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            with self._turn:
                running, self._running = self._running, None
            if running is not None:
                wake, ended = running
                wake.release()
                ended.acquire(timeout=_STOP_WITHIN_S)

    def end(self) -> None:
        """Stop for good; a process that takes seconds to exit must not seem to be in the call of its last heartbeat."""
        self.pause()
        if os.getpid() == self._pid:
            last = {"rank": self._rank, "pid": self._pid, "doing": "exiting"}
            last |= {"beat": self._beat + 1, "moves": self._moves + 1}
            with contextlib.suppress(OSError):
                _write(self._path, json.dumps(last))

    def _run(self, wake: _thread.LockType, ended: _thread.LockType) -> None:
        try:
            while not wake.acquire(timeout=_EVERY_S):
                with contextlib.suppress(Exception):
                    self.beat()
        finally:
            ended.release()

    def beat(self) -> None:
        """Write one heartbeat, and a stack dump if requested."""
        self._beat += 1
        frames = sys._current_frames()
        innermost = frames.get(self._main or 0)
        self._delegates = stack.waits_for_thread(innermost)
        if self._delegates and self._worker in frames:
            innermost = frames[self._worker]
        reading = stack.read_main_thread(innermost)
        # The frames would keep the local variables of finished calls alive, such as activations.
        del frames, innermost
        progress = _reported_progress()
        step, phase = progress.get("step"), progress.get("phase", "")
        status = collectives.read_status()
        is_stuck = self._notice_moves(
            (status.text, step, phase), reading.waiting or status.has_unfinished
        )
        heartbeat = {
            "rank": self._rank,
            "pid": self._pid,
            "beat": self._beat,
            "moves": self._moves,
            "step": step,
            "phase": phase or reading.phase,
            "place": reading.place,
            "doing": reading.doing,
            "waiting": reading.waiting,
            "handles": handled_signals(),
            "groups": collectives.joined_groups(),
            "collectives": status.count,
            "begun": self._begun,
            "waits": self._waits,
            "data_share": progress.get("data_share"),
            "communication_share": progress.get("communication_share"),
        }
        _write(self._path, json.dumps(heartbeat))
        # After the heartbeat: both may block for as long as the rank hangs in a call of the GPU's driver.
        if is_stuck and self._read_collectives():
            heartbeat |= {"begun": self._begun, "waits": self._waits}
            _write(self._path, json.dumps(heartbeat))
        if self._stacks_request.exists():
            self._write_stacks()
            self._stacks_request.unlink()

    def _notice_moves(self, seen: tuple[object, ...], in_collective: bool) -> bool:
        """Count a change; return whether the rank stands still and its collectives are to be read."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_s = seen, now
            self._moves += 1
            self._begun, self._waits, self._has_read = {}, [], False
            return False
        still_s = now - self._moved_s
        if still_s < _STILL_AFTER_S or self._has_read:
            return False
        # Reading the collectives takes tens of milliseconds: once per standstill.
        self._has_read = in_collective or still_s >= _STILL_WITHOUT_ONE_AFTER_S
        return self._has_read

    def _read_collectives(self) -> bool:
        """Read the collectives that this rank has begun and waits in; return whether they could be read."""
        with self._flight_recorder() as readable:
            if readable:
                progress = collectives.read_progress(main_waits_for_thread=self._delegates)
                self._begun, self._waits = progress.begun, progress.waits
                self._worker = progress.worker
        return readable

    @contextlib.contextmanager
    def _flight_recorder(self) -> Iterator[bool]:
        """Give whether the flight recorder may be read: not if an earlier thread is still reading it.

        A fork replaces this thread, also while it is blocked in the recorder.
        """
        if self._reading:
            yield False
            return
        collectives.use_rank_device(_recorded_device())
        self._reading = True
        try:
            yield True
        finally:
            self._reading = False

    def _write_stacks(self) -> None:
        """Write the stacks of all threads and the flight recorder's entries."""
        _write(self._path.with_name(f"rank-{self._rank}.stacks.txt"), all_stacks(self._rank))
        with contextlib.suppress(Exception), self._flight_recorder() as readable:
            if readable:
                flight = collectives.dump_entries()
                _write(self._path.with_name(f"rank-{self._rank}.flight.json"), flight)


def handled_signals() -> list[str]:
    """Return the stop and warning signals for which this process calls a Python function."""
    names = []
    for name in _STOP_SIGNALS:
        number = getattr(signal, name, None)  # Windows lacks some
        if number is not None and signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            names.append(name)
    return names


def all_stacks(rank: int) -> str:
    """Return the Python stacks of all threads except this one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(_thread.get_ident())
    main = threading.main_thread().ident
    text = f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}\n"
    for thread in sorted(frames, key=lambda ident: ident != main):
        text += f"\nthread {names.get(thread, 'of a library')}, innermost call last:\n"
        text += "".join(traceback.format_stack(frames[thread]))
    return text


def _reported_progress() -> dict[str, Any]:
    """Return what the trainer reports, or the recorder of another library."""
    progress = getattr(sys.modules.get(_PROGRESS), "progress", None)
    if progress is not None and progress.step is not None:
        return {name: getattr(progress, name) for name in progress.__slots__}
    recorder = getattr(sys.modules.get(_RECORDER), "recorder", None)
    if recorder is None:
        return {}
    recorder.beat()
    return {"step": recorder.step, "data_share": recorder.data_share}


def _recorded_device() -> Any:
    return getattr(getattr(sys.modules.get(_RECORDER), "recorder", None), "device", None)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
