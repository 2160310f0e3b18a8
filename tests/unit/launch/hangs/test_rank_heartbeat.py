"""The thread in each rank that tells what it is doing: what it says, and that the script does not notice it."""

import builtins
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import msgspec
import pytest

from patience import GIVE_UP_S
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.rank import heartbeat, stack
from torchmuster.launch.rank.heartbeat import STACKS_SIGNAL, HeartbeatWriter

# From 3.12 on, Python warns of a fork in a process with threads.
_FORKS_ON_PURPOSE = "ignore:This process:DeprecationWarning"
_BEGIN = """\
import os, signal, sys, threading, time
from pathlib import Path
from torchmuster.launch.rank import heartbeat
records = Path(sys.argv[1])
heartbeat._EVERY_S = 0.02
heartbeat.start_heartbeat(3, records)
path = records / "rank-3.heartbeat.json"
def read():
    import json
    return json.loads(path.read_text())
def beat_after(beat):
    deadline = time.monotonic() + 300
    while not path.exists() or read()["beat"] <= beat:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return read()["beat"]
def count_threads():
    deadline = time.monotonic() + 300  # one that has been told to end may still be at it
    while len(os.listdir("/proc/self/task")) > 2 and time.monotonic() < deadline: time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))
"""


def run(folder: Path, script: str, *flags: str) -> str:
    """Run a script with a heartbeat in a process of its own; return what it printed."""
    (folder / "script.py").write_text(_BEGIN + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-W", _FORKS_ON_PURPOSE, *flags, str(folder / "script.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_last_heartbeat_of_a_process_shows_no_call_of_its_script(tmp_path: Path) -> None:
    run(tmp_path, "beat_after(0)\ntime.sleep(0.1)")
    content = (tmp_path / "rank-3.heartbeat.json").read_bytes()
    last = msgspec.json.decode(content, type=Heartbeat)
    assert (last.rank, last.place, last.doing, last.waiting) == (3, "", "exiting", False)


def test_a_heartbeat_is_what_the_agent_reads(tmp_path: Path) -> None:
    HeartbeatWriter(5, tmp_path).beat()
    heartbeat = msgspec.json.decode(
        (tmp_path / "rank-5.heartbeat.json").read_bytes(), type=Heartbeat
    )
    assert (heartbeat.rank, heartbeat.pid, heartbeat.beat, heartbeat.moves) == (
        5,
        os.getpid(),
        1,
        1,
    )
    assert (heartbeat.waiting, heartbeat.begun, heartbeat.waits) == (False, {}, ())


def test_what_a_call_had_in_hand_is_given_back_while_a_heartbeat_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Activation:
        pass

    writes, is_back = threading.Event(), threading.Event()

    def write(path: Path, text: str) -> None:
        writes.set()
        is_back.wait(GIVE_UP_S)

    def forward() -> "weakref.ref[Activation]":
        activation = Activation()
        beats.start()
        assert writes.wait(GIVE_UP_S)
        return weakref.ref(activation)

    monkeypatch.setattr(heartbeat, "_write", write)
    beats = threading.Thread(target=HeartbeatWriter(5, tmp_path).beat)
    seen = forward()
    lives_on = seen() is not None
    is_back.set()
    beats.join()
    assert not lives_on


def test_a_script_sees_no_other_thread_and_ends_as_soon_as_it_wants(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        heartbeat._EVERY_S = 600
        print(threading.active_count(), [one.name for one in threading.enumerate()])
        """,
    )
    assert out == "1 ['MainThread']\n"


def test_a_fork_has_no_heartbeat_and_the_parent_keeps_its_own(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        import warnings
        heartbeat._STOP_WITHIN_S = 300  # so that it shows who waits for a thread that is not there
        beat = beat_after(1)
        warnings.simplefilter("error")  # newer versions of Python warn of a fork beside threads
        child = os.fork()
        if child == 0:
            began = time.monotonic()
            grandchild = os.fork()  # as a loader's worker that starts a program
            if grandchild == 0:
                os._exit(0)
            os.waitpid(grandchild, 0)
            slow = time.monotonic() - began > 200
            time.sleep(0.2)
            os._exit(slow or len(os.listdir("/proc/self/task")) - 1)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        beat_after(beat + 2)
        print("pid", read()["pid"] == os.getpid(), "rank", read()["rank"])
        for _ in range(50):
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        beat_after(read()["beat"])
        print("threads", count_threads())
        """,
    )
    assert out == "child 0\npid True rank 3\nthreads 2\n"


def test_forks_from_many_threads_leave_one_heartbeat(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        def fork():
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
        threads = [threading.Thread(target=fork) for _ in range(4)]
        for one in threads: one.start()
        for one in threads: one.join()
        beat_after(beat_after(0))
        print(count_threads())
        """,
    )
    assert out == "2\n"


def test_stacks_are_shown_when_asked_for_and_by_a_signal(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        def wait_for(*files):
            while not all((records / one).exists() for one in files): time.sleep(0.01)
            return [(records / one).read_text() for one in files]
        def in_a_thread(): time.sleep(600)
        threading.Thread(target=in_a_thread, name="helper", daemon=True).start()
        (records / "rank-3.examine").touch()
        text, = wait_for("rank-3.stacks.txt")
        while (records / "rank-3.examine").exists(): time.sleep(0.01)
        print("rank 3, process" in text, "thread helper" in text, "in_a_thread" in text)
        print(text.index("thread MainThread") < text.index("thread helper"), "in _show" in text)
        os.kill(os.getpid(), heartbeat.STACKS_SIGNAL)
        print("most recent call first" in (records / "rank-3.faults.txt").read_text())
        """,
    )
    assert out == "True True True\nTrue False\nTrue\n"


def test_a_signal_that_the_script_uses_is_left_to_it(tmp_path: Path) -> None:
    assert STACKS_SIGNAL is not None
    out = run(
        tmp_path,
        """
        signal.signal(heartbeat.STACKS_SIGNAL, lambda *_: print("mine", flush=True))
        os.kill(os.getpid(), heartbeat.STACKS_SIGNAL)
        heartbeat._register_stacks(records / "other.txt")
        print((records / "other.txt").exists())
        """,
    )
    assert out == "mine\nFalse\n"


# ---- what a stack says


def read(
    source: str, tmp_path: Path, *, library: str = "", library_source: str = ""
) -> stack.ThreadReading:
    """Read the stack at the moment at which a script, or a library that it knows, calls ``look``."""
    found = []

    def look(*_: object) -> None:
        # As if a function in C had been called, which has no frame.
        found.append(stack.read_main_thread(sys._getframe(1)))

    space: dict[str, object] = {"look": look}
    for name, text in ((f"site-packages/{library}", library_source), ("train.py", source)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        exec(compile(path.read_text(), str(path), "exec"), space)
    return found[0]


@pytest.mark.parametrize(
    ("line", "doing"),
    [
        ("import seldom_used", "import seldom_used"),
        ("import json, seldom_used as rare", "import json, seldom_used"),
        ("from seldom_used import name", "import seldom_used"),
    ],
)
def test_an_import_is_named(
    line: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    library = "name = 1\nif __name__ == 'seldom_used':\n    import builtins\n    builtins.look()\n"
    source = f"import builtins\nbuiltins.look = look\n{line}\n"
    try:
        reading = read(source, tmp_path, library="seldom_used.py", library_source=library)
    finally:
        sys.modules.pop("seldom_used", None)
        del builtins.look  # type: ignore[attr-defined]
    assert (reading.place, reading.doing) == ("train.py:3", doing)


def test_the_stop_signals_that_a_script_handles_are_known() -> None:
    names = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    former = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        for name in former:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        assert heartbeat.handled_signals() == []
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert heartbeat.handled_signals() == ["SIGTERM"]
    finally:
        for name, handler in former.items():
            signal.signal(getattr(signal, name), handler)


def test_the_place_and_the_call_in_the_user_s_code(tmp_path: Path) -> None:
    reading = read(
        """
        class time: sleep = look
        def step(batch):
            total = 1 + len(str(time.sleep(600) or batch))
        step([1])
        """,
        tmp_path,
    )
    assert (reading.place, reading.doing) == ("train.py:4 in step", "time.sleep")
    assert (reading.phase, reading.waiting) == ("", False)


@pytest.mark.parametrize(
    ("library", "function", "doing", "waiting"),
    [
        ("torch/distributed/distributed_c10d.py", "all_reduce", "all_reduce", True),
        ("torch/distributed/distributed_c10d.py", "init_process_group", "init_process_group", True),
        ("torch/utils/data/dataloader.py", "__next__", "DataLoader.__next__", False),
        ("torch/autograd/graph.py", "_engine_run_backward", "backward", False),
        ("torch/serialization.py", "save", "torch.save", False),
        ("torch/somewhere.py", "unknown", "unknown", False),
    ],
)
def test_what_libraries_do_has_a_name(
    tmp_path: Path, library: str, function: str, doing: str, waiting: bool
) -> None:
    reading = read(
        f"""
        def step():
            {function}()
        step()
        """,
        tmp_path,
        library=library,
        library_source=f"def {function}(): look()",
    )
    assert (reading.place, reading.doing) == ("train.py:3 in step", doing)
    assert reading.waiting is waiting


def test_the_collective_that_was_called_counts_not_those_it_is_made_of(tmp_path: Path) -> None:
    reading = read(
        "all_gather_object()",
        tmp_path,
        library="torch/distributed/distributed_c10d.py",
        library_source="""
        def all_gather(): look()
        def wrapper(): all_gather()
        def all_gather_object(): wrapper()
        """,
    )
    assert (reading.doing, reading.waiting) == ("all_gather_object", True)


def test_a_script_asleep_in_its_dataset_is_loading_data(tmp_path: Path) -> None:
    reading = read(
        """
        def __getitem__(): look()
        __next__(__getitem__)
        """,
        tmp_path,
        library="torch/utils/data/dataloader.py",
        library_source="def __next__(get): get()",
    )
    assert reading == stack.ThreadReading(
        place="train.py:2 in __getitem__", doing="look", phase="loading data"
    )


def test_a_trainer_of_an_installed_package_has_a_place_of_its_own(tmp_path: Path) -> None:
    """As with ``torchrun -m package.train``: no file is the user's."""
    packages = f"{tmp_path}/lib/python3.12/site-packages"
    frames = [
        stack.StackFrame(f"{packages}/torch/distributed/distributed_c10d.py", "all_reduce", 3252),
        stack.StackFrame(f"{packages}/package/train.py", "step", 88),
        stack.StackFrame(f"{tmp_path}/lib/python3.12/runpy.py", "_run_code", 88),
    ]
    reading = stack.read_stack(frames, lambda _: "")
    assert reading == stack.ThreadReading(
        place="train.py:88 in step", doing="all_reduce", waiting=True
    )
    own = stack.StackFrame("/work/main.py", "<module>", 3)
    assert stack.read_stack([*frames, own], lambda _: "").place == "main.py:3"


def test_torch_that_sets_itself_up_while_it_is_imported_does_not_compile() -> None:
    file = "/opt/lib/python3.12/site-packages/torch/_dynamo/trace_rules.py"
    compiling = stack.StackFrame(file, "load_compiled", 30)
    importing = stack.StackFrame("<frozen importlib._bootstrap>", "_find_and_load", 1176)
    own = stack.StackFrame("/work/train.py", "<module>", 4)
    reading = stack.read_stack([compiling, importing, own], lambda _: "import transformers")
    assert (reading.doing, reading.phase) == ("import transformers", "")
    # What a compiler imports while it works, or a script that another one imports, is no set-up.
    assert stack.read_stack([importing, compiling, own], lambda _: "").phase == "compiling"
    assert stack.read_stack([compiling, own, importing], lambda _: "").phase == "compiling"
