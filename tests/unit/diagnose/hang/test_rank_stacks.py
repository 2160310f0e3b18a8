"""What py-spy shows of real processes, and why it may not; native frames from recorded stacks."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose.hang import rank_stacks
from torchmuster.diagnose.hang.rank_stacks import (
    RankSnapshot,
    SnapshotRequest,
    ThreadStack,
    call_on_line,
    parse_dump,
    read_thread,
)
from torchmuster.launch.rank.stack import StackFrame
from unit.diagnose.hang.plain_ranks import started

PRINT = "import os, threading, time\nprint(os.getpid(), flush=True)\n"
SLEEPS = f"{PRINT}def load():\n    x = len(str(time.sleep(600)))\nload()\n"
LOCKED = f"{PRINT}lock = threading.Lock()\nlock.acquire()\nwith lock:\n    pass\n"
IN_A_THREAD = f"""{PRINT}
def work():
    time.sleep(600)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="takes rights away from itself: run the tests as root"
)


def snapshot_of(pid: int) -> RankSnapshot:
    """Look until the process sleeps; it has printed its number before."""
    deadline = time.monotonic() + GIVE_UP_S
    request = SnapshotRequest(pids=(pid,), native=(pid,), observe_s=0.2)
    while True:
        answer = asyncio.run(rank_stacks.take_snapshots(msgspec.to_builtins(request)))
        (look,) = msgspec.convert(answer, list[RankSnapshot])
        if (look.place and look.doing) or look.state in "TX":
            return look
        assert time.monotonic() < deadline, look


@pytest.mark.parametrize(
    ("script", "place", "doing", "source"),
    [
        (SLEEPS, "train.py:4 in load", "time.sleep", "x = len(str(time.sleep(600)))"),
        (LOCKED, "train.py:5", "lock.acquire", "with lock:"),
        (IN_A_THREAD, "train.py:5 in work", "time.sleep", "time.sleep(600)"),
    ],
    ids=["asleep", "lock", "thread"],
)
def test_the_line_the_call_and_the_source(
    tmp_path: Path, script: str, place: str, doing: str, source: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    with started(tmp_path / "train.py", port=41011) as (_, pid):
        look = snapshot_of(pid)
    assert (look.place, look.doing, look.source) == (place, doing, source)
    assert (look.waiting, look.problem) == (False, "")
    assert look.state == "S"
    assert look.busy < 0.5
    assert any("train.py" in frame for frame in look.stack)


def test_a_stopped_process_is_read_and_stays_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(tmp_path / "train.py", port=41012) as (_, pid):
        snapshot_of(pid)
        process = psutil.Process(pid)
        process.suspend()
        look = snapshot_of(pid)
        assert (look.state, look.place) == ("T", "train.py:4 in load")
        assert process.status() == psutil.STATUS_STOPPED


@root_only
def test_a_process_in_a_container_is_read_from_outside(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_A_THREAD)
    inside = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with started(tmp_path / "train.py", port=41016, before=inside) as (outer, number):
        assert number == 1  # as it counts itself
        (process,) = psutil.Process(outer).children()
        look = snapshot_of(process.pid)
    assert (look.place, look.doing) == ("train.py:5 in work", "time.sleep")
    assert look.thread > 2


# ---- refusals


def refused(pid: int, setup: str, *before: str) -> dict[str, str]:
    """Ask for the right to read a process, in a process with fewer rights."""
    script = f"""
import json, os, pwd
from torchmuster.diagnose.hang.rank_stacks import refuse_untraceable
from torchmuster.errors import Impossible
{setup}
try:
    refuse_untraceable({pid})
except Impossible as error:
    print(json.dumps({{"what": error.what, "why": error.why, "fix": error.fix}}))
"""
    done = subprocess.run(
        [*before, sys.executable, "-c", script], capture_output=True, text=True, timeout=GIVE_UP_S
    )
    assert done.stdout, done.stderr
    shown: dict[str, str] = json.loads(done.stdout.replace(str(pid), "PID"))
    return shown


@root_only
def test_a_process_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(tmp_path / "train.py", port=41014) as (_, pid):
        shown = refused(pid, "os.setgroups([]); os.setgid(65534); os.setuid(65534)")
    assert "root" in shown["why"]
    assert "sudo" in shown["fix"]


def test_the_kernel_s_ptrace_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is not on every machine, and is the machine's own: what it contains is given here."""
    monkeypatch.setattr(rank_stacks, "_text_of", lambda _: "1")
    error = rank_stacks._untraceable(os.getpid())
    assert "kernel.yama.ptrace_scope is 1" in error.why
    assert "sysctl kernel.yama.ptrace_scope=0" in error.fix


# ---- stacks as py-spy records them

TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = [
    StackFrame(f"{TORCH}/autograd/graph.py", "_engine_run_backward", 979),
    StackFrame(f"{TORCH}/_tensor.py", "backward", 623),
    StackFrame("/work/train.py", "step", 21),
]
WAIT = [StackFrame("/work/train.py", "step", 30)]


@pytest.mark.parametrize(
    ("frames", "native", "doing", "waiting"),
    [
        (BACKWARD, ["pthread_cond_wait", "c10d::Reducer::finalize_backward"], "all_reduce", True),
        (BACKWARD, ["at::native::mm", "torch::autograd::Engine::execute"], "backward", False),
        (BACKWARD, [], "backward", False),
        (WAIT, ["pthread_cond_wait", "c10d::Work::wait"], "", True),
        (WAIT, ["poll", "c10d::TCPStore::doWait", "c10d::TCPStore::wait"], "store.wait", True),
        (WAIT, ["cudaStreamSynchronize", "at::native::item"], "cuda.synchronize", True),
        (WAIT, ["clock_nanosleep", "time_sleep"], "time.sleep", False),
    ],
)
def test_native_frames_show_who_waits_for_ranks(
    frames: list[StackFrame], native: list[str], doing: str, waiting: bool
) -> None:
    thread = ThreadStack(tid=1, frames=tuple(frames), native=tuple(native))
    reading = read_thread(os.getpid(), thread)
    assert (reading.doing, reading.waiting) == (doing, waiting)
    assert reading.place.startswith("train.py:")


@pytest.mark.parametrize(
    ("line", "inner", "native", "call"),
    [
        ("loss = model(batch).sum()", "", (), ""),
        ("rows = list(read(path))", "read", (), "read"),
        ("self.queue.get()", "get", (), "self.queue.get"),
        ("work.wait()", "", ("c10d::Work::wait",), "work.wait"),
        ("x = f(time.sleep(3))", "", ("time_sleep",), "time.sleep"),
        ("with self.lock:", "", ("lock_PyThread_acquire_lock",), "lock.acquire"),
    ],
)
def test_the_call_on_a_line(line: str, inner: str, native: tuple[str, ...], call: str) -> None:
    assert call_on_line(line, inner=inner, native=native) == call


def test_a_dump_has_python_frames_by_their_bare_names_and_native_ones_below() -> None:
    def frame(name: str, file: str, line: int, module: str | None = None) -> dict[str, object]:
        return {"name": name, "filename": file, "line": line, "module": module}

    libc = "/usr/lib/libc.so.6"
    dump = [
        {
            "os_thread_id": 7,
            "frames": [
                frame("pthread_cond_wait", libc, 0, libc),
                frame("Samples.load.<locals>.<listcomp>", "/work/data.py", 41),
                frame("_start", libc, 0, libc),
                frame("main", "/work/train.py", 3),
            ],
        }
    ]
    (thread,) = parse_dump(json.dumps(dump).encode())
    assert thread == ThreadStack(
        tid=7,
        frames=(
            StackFrame("/work/data.py", "<listcomp>", 41),
            StackFrame("/work/train.py", "main", 3),
        ),
        native=("pthread_cond_wait",),
    )
    assert parse_dump(b"Error: no") == parse_dump(b"[3]") == []
