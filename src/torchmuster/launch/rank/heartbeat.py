"""The thread in each rank that writes down once a second what the rank is doing.

It only looks: no signal, no lock of the script's, no word on its output, and what goes wrong here is never the
script's concern. It is no thread that the script could see or wait for, and it is not there while the
process forks. Standard library only, as it runs beside whatever is installed on the machine.
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
from pathlib import Path
from typing import Any

from torchmuster.launch.rank import stack

_EVERY_S = 1.0
_STILL_AFTER_S = 3.0
_STILL_WITHOUT_ONE_AFTER_S = 6.0  # many a step takes some seconds
_STOP_WITHIN_S = 1.0
# What asks for the stacks of a rank in which Python cannot run. Nobody else's: the first real-time signals
# are glibc's, and people use the low numbers.
STACKS_SIGNAL = signal.SIGRTMAX - 2 if sys.platform == "linux" else None
# How the trainer says where it is, if it is there (train/progress.py).
_PROGRESS = "torchmuster.train.progress"


def start_heartbeat(rank: int, records: Path) -> None:
    """Begin to write heartbeats; what cannot be had here is done without."""
    with contextlib.suppress(Exception):
        _register_stacks(records / f"rank-{rank}.faults.txt")
        writer = HeartbeatWriter(rank, records)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=writer.pause, after_in_parent=writer.start)
        # Python ends what still runs when it ends itself by unwinding it, which torch's C++ does not bear: it
        # aborts. Registered before all of the script's own, so it comes after them.
        atexit.register(writer.pause)
        writer.start()


def _register_stacks(path: Path) -> None:
    if STACKS_SIGNAL is not None and signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        # Kept open for the life of the process: a signal's handler cannot open it.
        faulthandler.register(STACKS_SIGNAL, path.open("w"), all_threads=True)


class HeartbeatWriter:
    """Writes the heartbeats of one rank."""

    def __init__(self, rank: int, records: Path) -> None:
        self._rank = rank
        self._path = records / f"rank-{rank}.heartbeat.json"
        self._asked = records / f"rank-{rank}.examine"
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._beat = self._moves = 0
        self._seen: tuple[object, ...] = ()
        self._moved_s = time.monotonic()
        self._begun: dict[str, int] = {}
        self._waits: list[dict[str, Any]] = []
        self._looked = False
        self._delegates = False  # the main thread waits for another one
        self._worker: int | None = None  # which, as far as collectives tell
        self._turn = _thread.allocate_lock()  # several threads may fork at once
        self._running: tuple[_thread.LockType, _thread.LockType] | None = None

    def start(self) -> None:
        """Start the thread; not one of ``threading``'s, which a script counts and waits for."""
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
        """End the thread, so that a fork does not copy what it is in the middle of."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            with self._turn:
                running, self._running = self._running, None
            if running is not None:
                wake, ended = running
                wake.release()
                ended.acquire(timeout=_STOP_WITHIN_S)

    def _run(self, wake: _thread.LockType, ended: _thread.LockType) -> None:
        try:
            while not wake.acquire(timeout=_EVERY_S):
                with contextlib.suppress(Exception):
                    self.beat()
        finally:
            ended.release()

    def beat(self) -> None:
        """Write one heartbeat, and show everything if that was asked for."""
        self._beat += 1
        frames = sys._current_frames()
        innermost = frames.get(self._main or 0)
        self._delegates = stack.waits_for_thread(innermost)
        if self._delegates and self._worker in frames:
            innermost = frames[self._worker]
        reading = stack.read_main_thread(innermost)
        # What calls that return meanwhile had in hand would live on with them: activations.
        del frames, innermost
        told = _told_by_trainer()
        step, phase = told.get("step"), told.get("phase", "")
        status = stack.collective_status()
        self._notice_moves((status, step, phase), status, waiting=reading.waiting)
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
            "groups": stack.groups_joined(),
            "begun": self._begun,
            "waits": self._waits,
            "data_share": told.get("data_share"),
            "communication_share": told.get("communication_share"),
        }
        _write(self._path, json.dumps(heartbeat))
        if self._asked.exists():
            self._show()
            self._asked.unlink()

    def _notice_moves(self, seen: tuple[object, ...], status: bytes, *, waiting: bool) -> None:
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_s = seen, now
            self._moves += 1
            self._begun, self._waits, self._looked = {}, [], False
            return
        still_s = now - self._moved_s
        if still_s < _STILL_AFTER_S or self._looked:
            return
        # A look at the collectives themselves takes tens of milliseconds: once for each standstill.
        in_one = waiting or stack.some_not_done(status)
        if in_one or still_s >= _STILL_WITHOUT_ONE_AFTER_S:
            self._looked = True
            found = stack.collective_progress(main_waits_for_thread=self._delegates)
            self._begun, self._waits, self._worker = found.begun, found.waits, found.worker

    def _show(self) -> None:
        """Write down the stacks of all threads, and what the flight recorder has."""
        _write(self._path.with_name(f"rank-{self._rank}.stacks.txt"), all_stacks(self._rank))
        with contextlib.suppress(Exception):
            flight = stack.dump_flight_record()
            _write(self._path.with_name(f"rank-{self._rank}.flight.json"), flight)


def all_stacks(rank: int) -> str:
    """Return the Python stacks of all threads but this one, the main thread's first."""
    names = {one.ident: one.name for one in threading.enumerate()}
    main, here = threading.main_thread().ident, _thread.get_ident()
    frames = sys._current_frames()
    parts = [f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}\n"]
    for thread in sorted(frames, key=lambda one: one != main):
        if thread != here:
            lines = "".join(traceback.format_stack(frames[thread]))
            parts.append(
                f"\nthread {names.get(thread, 'of a library')}, innermost call last:\n{lines}"
            )
    return "".join(parts)


def _told_by_trainer() -> dict[str, Any]:
    told = getattr(sys.modules.get(_PROGRESS), "progress", None)
    return {name: getattr(told, name) for name in told.__slots__} if told is not None else {}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
