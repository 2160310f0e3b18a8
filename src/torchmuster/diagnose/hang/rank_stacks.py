"""Look at the ranks of this host from outside: how busy they are, and their stacks, taken by ``py-spy``.

A look first observes a rank for a second without touching it, then takes its stacks, which stops it for some
milliseconds (native frames: up to a second, so they are only taken of ranks that are idle, or that wait for a GPU).
"""

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.launch import torch_private
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS
from torchmuster.launch.node.heartbeats import GONE, children_stats, look_at_process
from torchmuster.launch.rank import stack
from torchmuster.launch.rank.stack import StackFrame, ThreadReading
from torchmuster.redaction import redact_text

_PROC = Path("/proc")
_DUMP_WITHIN_S = 20.0
_SETTLE_S = 0.05  # until a thread that was stopped waits again
_CLOCKS_DIFFER_S = 2.0  # the start of a process is known to a second
_FRAMES_KEPT = 40
_WORKERS_READ = 16
_CALL = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python\d\.\d+t?)/")
# Functions of CPython in which threads often hang, and their names in Python.
_CPYTHON = {
    "time_sleep": "time.sleep",
    "acquire_lock": "lock.acquire",
    "sock_recv": "socket.recv",
    "sock_connect": "socket.connect",
    "os_waitpid": "os.waitpid",
    "os_read": "os.read",
}


class WorkerLook(msgspec.Struct, frozen=True, kw_only=True):
    """A data loader worker of a rank that is in the user's code."""

    pid: int
    place: str
    doing: str
    source: str = ""
    stack: tuple[str, ...] = ()


class RankLook(msgspec.Struct, frozen=True, kw_only=True):
    """A rank as seen at one moment. ``problem`` says why there is no stack, if there is none."""

    pid: int
    state: str  # of the process: R, S, D, T (stopped), X (gone)
    busy: float = 0.0  # CPUs used by it and its children in the last second
    thread: int = 0  # the thread that was read: the main one, or the one it waits for
    wakeups: tuple[int, int, int] = (0, 0, 0)  # at the start, before and after taking the stack
    place: str = ""
    doing: str = ""
    phase: str = ""
    waiting: bool = False
    source: str = ""  # the line of the place
    stack: tuple[str, ...] = ()  # innermost first
    workers: tuple[WorkerLook, ...] = ()
    problem: str = ""


class LookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which processes to look at, and for which to take native frames: only if idle, or always."""

    pids: tuple[int, ...]
    native_if_idle: tuple[int, ...] = ()
    native: tuple[int, ...] = ()
    nonblocking: bool = False
    observe_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """One thread: its Python frames and the native functions below them, innermost first."""

    tid: int
    frames: tuple[StackFrame, ...]
    native: tuple[str, ...] = ()


async def look_at_ranks(argument: Any) -> Any:
    """Look at ranks of this host (a verb of ``host_probe.py``)."""
    request = msgspec.convert(argument, LookRequest)
    spy = find_py_spy()
    for pid in request.pids:
        refuse_untraceable(pid)
    before = {pid: _Counters.read(pid) for pid in request.pids}
    await asyncio.sleep(request.observe_s)
    after = {pid: _Counters.read(pid) for pid in request.pids}
    at_once = asyncio.Semaphore(os.cpu_count() or 1)

    async def look(pid: int) -> RankLook:
        async with at_once:
            return await _look_at_rank(spy, request, before[pid], after[pid])

    return msgspec.to_builtins(await asyncio.gather(*map(look, request.pids)))


# ---- what the system knows


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """A process at one moment; ``waits`` counts how often each thread went to sleep."""

    pid: int
    at_s: float
    state: str
    cpu_s: float
    waits: Mapping[int, int]

    @classmethod
    def read(cls, pid: int) -> "_Counters":
        stat = look_at_process(pid)
        return cls(
            pid=pid,
            at_s=time.monotonic(),
            state=GONE if stat is None else stat.state,
            cpu_s=0.0 if stat is None else stat.cpu_s + children_stats([pid])[pid],
            waits={tid: _waits(pid, tid) for tid in _thread_ids(pid)},
        )


def _thread_ids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one.name) for one in (_PROC / str(pid) / "task").iterdir()]
    return []


def _waits(pid: int, tid: int) -> int:
    """Return how often a thread has given up its CPU to wait."""
    text = _text_of(f"/proc/{pid}/task/{tid}/status")
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _id_inside(pid: int, tid: int) -> int:
    """Return the number of a thread in its own process namespace."""
    found = re.search(r"^NSpid:.*?(\d+)$", _text_of(f"/proc/{pid}/task/{tid}/status"), re.MULTILINE)
    return int(found[1]) if found else tid


def _text_of(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


# ---- py-spy


def find_py_spy() -> str:
    """Return the path of py-spy, which pip installs next to Python."""
    beside = Path(sys.executable).with_name("py-spy")
    if found := str(beside) if beside.exists() else shutil.which("py-spy"):
        return found
    raise Impossible(
        "py-spy is not installed",
        why="muster hang uses it to read the stacks of the ranks",
        fix=f"{sys.executable} -m pip install 'torchmuster[hang]'",
    )


def refuse_untraceable(pid: int) -> None:
    """Raise an error if the system does not allow reading this process, with the command that changes it."""
    try:
        # The kernel checks here what it checks for ptrace; opening does not stop the process.
        (_PROC / str(pid) / "mem").open("rb").close()
    except PermissionError:
        raise _untraceable(pid) from None
    except OSError:
        return  # it has exited


def _untraceable(pid: int) -> Impossible:
    what = f"the system does not allow reading the stack of process {pid}"
    sudo = 'sudo "$(command -v muster)" hang'
    try:
        owner = psutil.Process(pid).username()
        same_user = psutil.Process(pid).uids().real == os.getuid()
    except psutil.Error:
        owner, same_user = "another user", False
    if not same_user and os.geteuid() != 0:
        return Impossible(
            what, why=f"it belongs to {owner}", fix=f"{sudo} {pid}   # or as {owner}, without sudo"
        )
    scope = _text_of("/proc/sys/kernel/yama/ptrace_scope")
    if scope == "3":
        return Impossible(
            what,
            why="kernel.yama.ptrace_scope is 3, which forbids tracing processes until the next boot",
            fix="set kernel.yama.ptrace_scope=1 in /etc/sysctl.d/ and reboot",
        )
    if scope in ("1", "2") and os.geteuid() != 0:
        by_root = "" if scope == "2" else "sudo sysctl kernel.yama.ptrace_scope=0   # or:\n"
        return Impossible(
            what,
            why=f"kernel.yama.ptrace_scope is {scope}: only root may attach to running processes",
            fix=f"{by_root}{sudo} {pid}",
        )
    return Impossible(
        what,
        why="this user lacks the capability SYS_PTRACE here, as in most containers",
        fix=f"on the host, outside the container: {sudo}\n"
        "or start the container with: docker run --cap-add SYS_PTRACE …\n"
        'or in the pod: securityContext: {capabilities: {add: ["SYS_PTRACE"]}}',
    )


async def _dump_stacks(
    spy: str, pid: int, *, native: bool, nonblocking: bool
) -> tuple[list[ThreadStack], str]:
    """Return the threads of a process, and the reason if there are none."""
    flags = [*(["--native"] if native else []), *(["--nonblocking"] if nonblocking else [])]
    process = await asyncio.create_subprocess_exec(
        *(spy, "dump", "--json", "--pid", str(pid), *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DUMP_WITHIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        return [], f"py-spy did not finish within {_DUMP_WITHIN_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel then lets the rank continue
            await process.wait()
    if process.returncode != 0:
        if native:
            return await _dump_stacks(spy, pid, native=False, nonblocking=nonblocking)
        lines = [line.strip() for line in err.decode(errors="replace").splitlines()]
        return [], "py-spy: " + next(iter(lines), f"exit code {process.returncode}")
    # A process in a container counts its threads from 1, and py-spy shows these numbers.
    outside = {_id_inside(pid, tid): tid for tid in _thread_ids(pid)}
    threads = [replace(one, tid=outside.get(one.tid, 0)) for one in parse_dump(out)]
    if not any(one.tid == pid for one in threads):
        return [], "py-spy does not show the main thread of the rank"
    return threads, ""


def parse_dump(text: bytes) -> list[ThreadStack]:
    """Return the threads of a dump of py-spy; [] if it is not one."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return [_thread_stack(thread) for thread in untrusted.parse_json(text)]
    return []


def _thread_stack(thread: Mapping[str, Any]) -> ThreadStack:
    frames: list[StackFrame] = []
    native: list[str] = []
    for frame in thread["frames"]:
        if frame.get("module"):  # the library of a native frame
            if not frames:
                native.append(frame["name"])
        else:
            # A qualified name in newer versions of Python: Tensor.backward
            function = frame["name"].rpartition(".")[2]
            frames.append(StackFrame(frame["filename"], function, int(frame["line"])))
    return ThreadStack(
        tid=int(thread.get("os_thread_id") or 0), frames=tuple(frames), native=tuple(native)
    )


# ---- reading a rank


async def _look_at_rank(
    spy: str, request: LookRequest, first: _Counters, now: _Counters
) -> RankLook:
    pid = first.pid
    if now.state in (GONE, "Z"):
        return RankLook(pid=pid, state=GONE)
    busy = max(0.0, now.cpu_s - first.cpu_s) / max(now.at_s - first.at_s, 0.001)
    # py-spy cannot stop what is stopped already, and would wait for what is in the kernel.
    nonblocking = request.nonblocking or now.state in ("T", "t", "D")
    idle = busy < BUSY_PROCESSORS
    wanted = pid in request.native or (idle and pid in request.native_if_idle)
    native = wanted and not nonblocking
    threads, problem = await _dump_stacks(spy, pid, native=native, nonblocking=nonblocking)
    chosen = choose_thread(pid, threads)
    await asyncio.sleep(_SETTLE_S)
    look = RankLook(pid=pid, state=now.state, busy=round(busy, 3), problem=problem)
    if chosen is None:
        return look
    reading = read_thread(pid, chosen)
    if idle and not chosen.native and reading.doing == "backward":
        # Without native frames: a backward that computes nothing waits for DDP's gradients.
        reading = replace(reading, doing="all_reduce", waiting=True)
    tid = chosen.tid
    return msgspec.structs.replace(
        look,
        thread=tid,
        wakeups=(first.waits.get(tid, 0), now.waits.get(tid, 0), _waits(pid, tid)),
        place=reading.place,
        doing=reading.doing,
        phase=reading.phase,
        waiting=reading.waiting,
        source=_own_source(pid, chosen.frames),
        stack=_stack_lines(chosen.frames),
        workers=await _busy_workers(spy, pid)
        if wanted and reading.doing.startswith("DataLoader")
        else (),
    )


def _stack_lines(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    return tuple(
        f"{frame.function} ({_LIBRARY.sub('', frame.file)}:{frame.line})"
        for frame in frames[:_FRAMES_KEPT]
    )


def choose_thread(pid: int, threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the main thread; if it only waits for another thread, the one that waits for ranks or runs the script."""
    main = next((one for one in threads if one.tid == pid), None)
    if main is None or not stack.is_waiting_for_thread(main.frames):
        return main
    others = [(one, read_thread(pid, one)) for one in threads if one is not main]
    waiting = [one for one, reading in others if reading.waiting]
    own = [one for one, reading in others if reading.place]
    return next(iter([*waiting, *own]), main)


def read_thread(pid: int, thread: ThreadStack) -> ThreadReading:
    """Return what a thread does; native frames show waits that Python's frames do not."""
    frames = thread.frames
    reading = stack.read_stack(
        frames,
        lambda place: call_on_line(
            _source_line(pid, frames[place]),
            inner=frames[place - 1].function if place else "",
            native=() if place else thread.native,
        ),
    )
    operation = "" if reading.waiting else torch_private.native_wait(thread.native)
    if not operation:
        return reading
    return replace(reading, doing=reading.doing if operation == "wait" else operation, waiting=True)


def call_on_line(line: str, *, inner: str = "", native: Sequence[str] = ()) -> str:
    """Return the call in progress on a line of source, from what it has called: ``time.sleep``.

    ``inner`` is the Python function that it called, if any; else ``native`` are the native functions.
    """
    for name, call in _CPYTHON.items():
        if any(name in function for function in native):
            return call
    calls: list[str] = _CALL.findall(line)
    named = [one for one in calls if one.rpartition(".")[2] == inner]
    return next(iter(named), calls[0] if len(calls) == 1 else "")


def _own_source(pid: int, frames: Sequence[StackFrame]) -> str:
    own = stack.own_frame(frames)
    return "" if own is None else redact_text(_source_line(pid, frames[own]))


def _source_line(pid: int, frame: StackFrame) -> str:
    """Return a line of source as the process sees its files; "" if the file has changed since its start."""
    # The path is the process's own: in its working folder, and in its container.
    inside = Path(f"/proc/{pid}/cwd") / frame.file
    path = Path(f"/proc/{pid}/root{frame.file}") if frame.file.startswith("/") else inside
    with contextlib.suppress(OSError, psutil.Error, ValueError):
        if path.stat().st_mtime > psutil.Process(pid).create_time() + _CLOCKS_DIFFER_S:
            return ""
        source = untrusted.read_bounded(path).decode("utf-8", errors="replace").split("\n")
        return source[frame.line - 1].strip() if 0 < frame.line <= len(source) else ""
    return ""


async def _busy_workers(spy: str, pid: int) -> tuple[WorkerLook, ...]:
    """Return the data loader workers of a rank that are in the user's code."""
    try:
        children = psutil.Process(pid).children(recursive=True)[:_WORKERS_READ]
    except psutil.Error:
        return ()
    found = []
    for child in children:
        threads, _ = await _dump_stacks(spy, child.pid, native=True, nonblocking=False)
        main = next((one for one in threads if one.tid == child.pid), None)
        if main is None:
            continue
        # Below the worker's loop: a worker without work waits there for its next batch.
        reading = read_thread(child.pid, main)
        if reading.place and not _is_idle(main):
            found.append(
                WorkerLook(
                    pid=child.pid,
                    place=reading.place,
                    doing=reading.doing,
                    source=_own_source(child.pid, main.frames),
                    stack=_stack_lines(main.frames),
                )
            )
    return tuple(found)


def _is_idle(worker: ThreadStack) -> bool:
    """Return whether a worker waits for its next batch: in its queue, called by its loop."""
    names = [frame.function for frame in worker.frames]
    loop = names.index(torch_private.WORKER_LOOP) if torch_private.WORKER_LOOP in names else 0
    return loop == 0 or names[loop - 1] == "get"
