"""Take snapshots of this host's ranks from outside: how busy each is, and its stack, read by ``py-spy``.

A rank is first observed for a second without touching it; then py-spy stops it for some milliseconds to read its
stack. Native frames take up to a second, so they are read once, and only of ranks that are idle or use a GPU.
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
from torchmuster.diagnose.hang.rank_processes import uses_gpu
from torchmuster.errors import Impossible
from torchmuster.launch import torch_private
from torchmuster.launch.hangs.observation import BUSY_PROCESSORS
from torchmuster.launch.node.heartbeats import GONE, cpu_s_with_children, read_process
from torchmuster.launch.rank import stack
from torchmuster.launch.rank.stack import StackFrame, ThreadReading
from torchmuster.redaction import redact_text

_WITH_SUDO = 'sudo "$(command -v muster)" hang'
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


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A data loader worker of a rank that is in the user's code."""

    pid: int
    place: str
    doing: str
    source: str = ""
    stack: tuple[str, ...] = ()


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A rank at one moment. ``problem`` says why there is no stack, if there is none."""

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
    workers: tuple[WorkerSnapshot, ...] = ()
    problem: str = ""


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which processes to read, and of which the native frames are not known yet."""

    pids: tuple[int, ...]
    native: tuple[int, ...] = ()
    observe_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """One thread: its Python frames and the native functions below them, innermost first."""

    tid: int
    frames: tuple[StackFrame, ...]
    native: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Usage:
    """What the kernel has counted of a process; ``sleeps`` is how often each thread has waited."""

    pid: int
    at_s: float
    state: str
    cpu_s: float
    sleeps: Mapping[int, int]


async def take_snapshots(argument: Any) -> Any:
    """Return a snapshot of each rank: the answer to a request to ``host_probe.py``."""
    request = msgspec.convert(argument, SnapshotRequest)
    spy = find_py_spy()
    for pid in request.pids:
        refuse_untraceable(pid)
    before = [_read_usage(pid) for pid in request.pids]
    await asyncio.sleep(request.observe_s)
    after = [_read_usage(pid) for pid in request.pids]
    processors = asyncio.Semaphore(os.cpu_count() or 1)

    async def snapshot(first: _Usage, last: _Usage) -> RankSnapshot:
        async with processors:
            return await _take_snapshot(spy, first, last, native=first.pid in request.native)

    snapshots = await asyncio.gather(*map(snapshot, before, after))
    return msgspec.to_builtins(snapshots)


async def _take_snapshot(spy: str, first: _Usage, last: _Usage, *, native: bool) -> RankSnapshot:
    pid = first.pid
    if last.state in (GONE, "Z"):
        return RankSnapshot(pid=pid, state=GONE)
    busy = max(0.0, last.cpu_s - first.cpu_s) / max(last.at_s - first.at_s, 0.001)
    is_idle = busy < BUSY_PROCESSORS
    native = native and (is_idle or uses_gpu(pid))
    # py-spy cannot stop what is stopped already, and would wait for what is in the kernel.
    can_stop = last.state not in ("T", "t", "D")
    threads, problem = await _dump_stacks(spy, pid, native=native and can_stop, stop=can_stop)
    thread = choose_thread(pid, threads)
    await asyncio.sleep(_SETTLE_S)
    snapshot = RankSnapshot(pid=pid, state=last.state, busy=round(busy, 3), problem=problem)
    if thread is None:
        return snapshot
    reading = read_thread(pid, thread)
    if is_idle and not thread.native and reading.doing == "backward":
        # Without native frames: a backward that computes nothing waits for DDP's gradients.
        reading = replace(reading, doing="all_reduce", waiting=True)
    workers: list[WorkerSnapshot] = []
    if native and reading.doing.startswith("DataLoader"):
        workers = await _busy_workers(spy, pid)
    tid = thread.tid
    return msgspec.structs.replace(
        snapshot,
        thread=tid,
        wakeups=(first.sleeps.get(tid, 0), last.sleeps.get(tid, 0), _sleeps(pid, tid)),
        place=reading.place,
        doing=reading.doing,
        phase=reading.phase,
        waiting=reading.waiting,
        source=_own_source(pid, thread.frames),
        stack=_stack_lines(thread.frames),
        workers=tuple(workers),
    )


async def _busy_workers(spy: str, pid: int) -> list[WorkerSnapshot]:
    """Return the data loader workers of a rank that are in the user's code."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    workers = []
    for child in children[:_WORKERS_READ]:
        threads, _ = await _dump_stacks(spy, child.pid, native=True, stop=True)
        main = _main_thread(child.pid, threads)
        if main is None or _waits_for_work(main):
            continue
        reading = read_thread(child.pid, main)
        if reading.place:
            worker = WorkerSnapshot(
                pid=child.pid,
                place=reading.place,
                doing=reading.doing,
                source=_own_source(child.pid, main.frames),
                stack=_stack_lines(main.frames),
            )
            workers.append(worker)
    return workers


def _waits_for_work(worker: ThreadStack) -> bool:
    """Return whether a worker waits for its next batch: in its queue, called by torch's worker loop."""
    functions = [frame.function for frame in worker.frames]
    if torch_private.WORKER_LOOP not in functions:
        return True
    loop = functions.index(torch_private.WORKER_LOOP)
    return loop == 0 or functions[loop - 1] == "get"


# ---- what the kernel knows


def _read_usage(pid: int) -> _Usage:
    state, cpu_s = GONE, 0.0
    process = read_process(pid)
    if process is not None:
        state = process.state
        cpu_s = cpu_s_with_children(pid)
    sleeps = {tid: _sleeps(pid, tid) for tid in _thread_ids(pid)}
    return _Usage(pid=pid, at_s=time.monotonic(), state=state, cpu_s=cpu_s, sleeps=sleeps)


def _thread_ids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _sleeps(pid: int, tid: int) -> int:
    """Return how often a thread has given up its CPU to wait."""
    return _status_number(pid, tid, r"voluntary_ctxt_switches:\s*(\d+)") or 0


def _id_inside(pid: int, tid: int) -> int:
    """Return the number of a thread in its own process namespace."""
    return _status_number(pid, tid, r"NSpid:.*?(\d+)$") or tid


def _status_number(pid: int, tid: int, pattern: str) -> int | None:
    status = _text_of(f"/proc/{pid}/task/{tid}/status")
    match = re.search(rf"^{pattern}", status, re.MULTILINE)
    return None if match is None else int(match[1])


def _text_of(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


# ---- py-spy


def find_py_spy() -> str:
    """Return the path of py-spy, which pip installs next to Python."""
    beside = Path(sys.executable).with_name("py-spy")
    if beside.exists():
        return str(beside)
    path = shutil.which("py-spy")
    if path is None:
        raise Impossible(
            "py-spy is not installed",
            why="muster hang uses it to read the stacks of the ranks",
            fix=f"{sys.executable} -m pip install 'torchmuster[hang]'",
        )
    return path


def refuse_untraceable(pid: int) -> None:
    """Raise an error if the system does not allow reading this process, with the command that changes it."""
    try:
        # The kernel checks here what it checks for ptrace; opening does not stop the process.
        Path(f"/proc/{pid}/mem").open("rb").close()
    except PermissionError:
        raise _untraceable(pid) from None
    except OSError:
        return  # it has exited


def _untraceable(pid: int) -> Impossible:
    owner = "another user"
    with contextlib.suppress(psutil.Error):
        owner = psutil.Process(pid).username()
    scope = _text_of("/proc/sys/kernel/yama/ptrace_scope") or "not set"
    return Impossible(
        f"the system does not allow reading the stack of process {pid}",
        why=f"it belongs to {owner}; kernel.yama.ptrace_scope is {scope}: from 1 on, only root may attach to "
        "running processes (with 3, nobody); in most containers, root may not either",
        fix=f"{_WITH_SUDO} {pid}   # or as {owner}\n"
        "sudo sysctl kernel.yama.ptrace_scope=0   # if it is 1 or 2\n"
        "docker run --cap-add SYS_PTRACE …   # in a container\n"
        'securityContext: {capabilities: {add: ["SYS_PTRACE"]}}   # in a pod',
    )


async def _dump_stacks(
    spy: str, pid: int, *, native: bool, stop: bool
) -> tuple[list[ThreadStack], str]:
    """Return the threads of a process, and the reason if there are none."""
    command = [spy, "dump", "--json", "--pid", str(pid)]
    if native:
        command.append("--native")
    if not stop:
        command.append("--nonblocking")
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DUMP_WITHIN_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return [], f"py-spy did not finish within {_DUMP_WITHIN_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel then lets the rank continue
            await process.wait()
    if process.returncode != 0:
        if native:
            return await _dump_stacks(spy, pid, native=False, stop=stop)
        reason = errors.decode(errors="replace").partition("\n")[0].strip()
        return [], f"py-spy: {reason or f'exit code {process.returncode}'}"
    # A process in a container counts its threads from 1, and py-spy shows these numbers.
    outside = {_id_inside(pid, tid): tid for tid in _thread_ids(pid)}
    threads = []
    for thread in parse_dump(output):
        threads.append(replace(thread, tid=outside.get(thread.tid, 0)))
    if _main_thread(pid, threads) is None:
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
        is_native = bool(frame.get("module"))  # its library
        if not is_native:
            # A qualified name in newer versions of Python: Tensor.backward
            function = frame["name"].rpartition(".")[2]
            frames.append(StackFrame(frame["filename"], function, int(frame["line"])))
        elif not frames:
            native.append(frame["name"])
    tid = int(thread.get("os_thread_id") or 0)
    return ThreadStack(tid=tid, frames=tuple(frames), native=tuple(native))


# ---- reading a stack


def choose_thread(pid: int, threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the main thread; if it only waits for another thread, the one that waits for ranks or runs the script."""
    main = _main_thread(pid, threads)
    if main is None or not stack.is_waiting_for_thread(main.frames):
        return main
    runs_script: ThreadStack | None = None
    for thread in threads:
        if thread is main:
            continue
        reading = read_thread(pid, thread)
        if reading.waiting:
            return thread
        if reading.place and runs_script is None:
            runs_script = thread
    return runs_script or main


def _main_thread(pid: int, threads: Sequence[ThreadStack]) -> ThreadStack | None:
    for thread in threads:
        if thread.tid == pid:
            return thread
    return None


def read_thread(pid: int, thread: ThreadStack) -> ThreadReading:
    """Return what a thread does; native frames show waits that Python's frames do not."""
    frames = thread.frames

    def call_in(index: int) -> str:
        line = _source_line(pid, frames[index])
        if index == 0:
            return call_on_line(line, native=thread.native)
        return call_on_line(line, inner=frames[index - 1].function)

    reading = stack.read_stack(frames, call_in)
    if reading.waiting:
        return reading
    operation = torch_private.native_wait(thread.native)
    if not operation:
        return reading
    if operation == "wait":
        operation = reading.doing
    return replace(reading, doing=operation, waiting=True)


def call_on_line(line: str, *, inner: str = "", native: Sequence[str] = ()) -> str:
    """Return the call in progress on a line of source, from what it has called: ``time.sleep``.

    ``inner`` is the Python function that it called, if any; else ``native`` are the native functions.
    """
    functions = " ".join(native)
    for name, call in _CPYTHON.items():
        if name in functions:
            return call
    calls: list[str] = _CALL.findall(line)
    for call in calls:
        if call.rpartition(".")[2] == inner:
            return call
    return calls[0] if len(calls) == 1 else ""


def _stack_lines(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    lines = []
    for frame in frames[:_FRAMES_KEPT]:
        lines.append(f"{frame.function} ({_LIBRARY.sub('', frame.file)}:{frame.line})")
    return tuple(lines)


def _own_source(pid: int, frames: Sequence[StackFrame]) -> str:
    own = stack.own_frame(frames)
    return "" if own is None else redact_text(_source_line(pid, frames[own]))


def _source_line(pid: int, frame: StackFrame) -> str:
    """Return a line of source as the process sees its files; "" if the file has changed since its start."""
    # The path is the process's own: in its container, or in its working folder.
    root = "root" if frame.file.startswith("/") else "cwd/"
    path = Path(f"/proc/{pid}/{root}{frame.file}")
    with contextlib.suppress(OSError, psutil.Error, ValueError):
        if path.stat().st_mtime > psutil.Process(pid).create_time() + _CLOCKS_DIFFER_S:
            return ""
        source = untrusted.read_bounded(path).decode("utf-8", errors="replace").split("\n")
        if 0 < frame.line <= len(source):
            return source[frame.line - 1].strip()
    return ""
