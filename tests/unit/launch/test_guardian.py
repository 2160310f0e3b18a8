"""The guardian: a killed launcher is started again, an end that was asked for is an end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import BUSY_S, GIVE_UP_S
from torchmuster.launch import evidence, guardian, ledger
from torchmuster.launch.keeper import sweep
from torchmuster.launch.spec import JobSpec
from torchmuster.runfolder import RunFolder, create

pytestmark = [
    pytest.mark.skipif(not guardian.is_possible(), reason="needs Linux"),
    pytest.mark.timeout(300),
]

# Stands for the command: its work is what is written here, and told when it begins.
PROGRAM = """\
import os, signal, subprocess, sys, time
from pathlib import Path
from torchmuster.launch import guardian, ledger
from torchmuster.launch.spec import JobSpec
from torchmuster.runfolder import RunFolder
run = RunFolder(Path(sys.argv[1]))
spec = JobSpec(name="x", command=("x.py",), folder="/", max_restarts=int(sys.argv[2]))

def work(started_before):
    ledger.write_job(run, spec, token="test-guardian-" + run.id)
    ledger.Diary(run).phase("running")
    print("begun", started_before, os.getpid(), flush=True)
{work}

{before}
code = guardian.guarded(run, spec, work, lambda text: print(text, flush=True))
print("over in", "guardian" if os.getpid() == {top} else "launcher", code, flush=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class Guarded:
    """A guarded program that runs."""

    process: "subprocess.Popen[str]"
    run: RunFolder

    def read(self, text: str) -> str:
        """Return the next line that begins with this text."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.startswith(text):
                return line.rstrip("\n")
        raise AssertionError(f"{text!r} was not said: {''.join(seen)}")

    def launcher(self) -> int:
        """Wait for the next launcher to begin, and return its process id."""
        return int(self.read("begun").split()[2])

    def end(self) -> tuple[int, str]:
        """Return the exit code and the rest of what was said."""
        out, _ = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, out


@pytest.fixture
def start(tmp_path: Path) -> Iterator["Start"]:
    begun = Start(tmp_path)
    yield begun
    for one in begun.programs:
        one.process.kill()
        one.process.communicate(timeout=GIVE_UP_S)
        assert not any("test-guardian" in " ".join(p.cmdline()) for p in children())


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Start:
    """Starts guarded programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[Guarded] = []

    def __call__(
        self, work: str, *, before: str = "", max_restarts: int = 3, run: RunFolder | None = None
    ) -> Guarded:
        run = run or create(self.folder / "runs", "guarded")
        indented = "".join(f"    {line}\n" for line in work.splitlines())
        text = PROGRAM.replace("{work}", indented).replace("{before}", before)
        text = text.replace("{top}", "int(os.environ['TOP'])")
        text = f"import os; os.environ['TOP'] = str(os.getpid())\n{text}"
        process = subprocess.Popen(
            [sys.executable, "-c", text, str(run.path), str(max_restarts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self.programs.append(Guarded(process, run))
        return self.programs[-1]


FOREVER = "time.sleep(600)"
# Where there is a pause at all, the test has time to look around.
LONG_PAUSES = """\
from torchmuster.launch import restarts
decide = restarts.decide
def patient(history, **more):
    chosen = decide(history, **more)
    return type(chosen)(value=chosen.value and 600.0, reason=chosen.reason)
restarts.decide = patient
"""
COUNTING = """\
def end(number, frame):
    print("got", signal.Signals(number).name, flush=True)
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(one, end)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(130))
print("ready", flush=True)
while True: time.sleep(0.05)
"""
POLITE = """\
def end(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(130)
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(one, end)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def test_the_exit_code_is_the_launcher_s(start: Start) -> None:
    code, out = start("return 7").end()
    assert code == 7
    assert out.splitlines()[1:] == ["over in launcher 7", "over in guardian 7"]


def test_a_killed_launcher_is_started_again_after_all_it_left_has_ended(start: Start) -> None:
    left_behind = """\
if started_before: return 0
env = {**os.environ, "TORCHMUSTER_RUN_TOKEN": "test-guardian-" + run.id + ".0"}
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeper, env=env, start_new_session=True).pid, flush=True)
time.sleep(600)"""
    program = start(left_behind)
    launcher = program.launcher()
    assert program.process.stdout is not None
    orphan = psutil.Process(int(program.process.stdout.readline()))
    os.kill(launcher, signal.SIGKILL)
    killed_s = time.monotonic()
    program.read("muster: the launcher was killed (SIGKILL); starting again (restart 1 of 3)")
    assert not orphan.is_running()
    # It is found; nobody waits until it ends by itself.
    assert time.monotonic() - killed_s < 15 + BUSY_S
    program.read("begun 1")
    assert program.end()[0] == 0
    console = program.run.console.read_text()
    assert console.count("launcher was killed (SIGKILL)") == 2  # what it left is ended first


def test_a_launcher_that_is_killed_again_and_again_is_given_up(
    start: Start, snapshot: SnapshotAssertion
) -> None:
    program = start("os.kill(os.getpid(), signal.SIGSEGV)", max_restarts=1)
    code, out = program.end()
    assert code == 1
    assert out.count("begun") == 2
    assert "launcher was killed (SIGSEGV)" in out
    state = ledger.read_state(program.run)
    assert state is not None
    (failed,) = evidence.failures(program.run)  # for explain
    assert failed.finding.name == "launcher-killed"
    assert failed.finding.why.splitlines()[0] == snapshot
    assert (state.phase, state.headline) == ("failed", failed.finding.what)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_arrives_once_although_the_whole_group_gets_it(
    start: Start, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    try:
        program = start(COUNTING)
    finally:
        signal.signal(signal.SIGHUP, before)
    program.read("ready")
    os.killpg(program.process.pid, number)
    program.read(f"got {number.name}")
    program.process.send_signal(signal.SIGUSR1)
    code, out = program.end()
    assert (code, "got" in out) == (130, False)


def test_what_was_asked_to_end_is_not_started_again_however_it_dies(start: Start) -> None:
    ignoring = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n" + FOREVER
    )
    program = start(ignoring)
    launcher = program.launcher()
    program.read("ready")
    program.process.terminate()
    os.kill(launcher, signal.SIGKILL)
    code, out = program.end()
    assert (code, "begun" in out) == (130, False)
    state = ledger.read_state(program.run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("stopped", 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_over_stays_as_it_ended_however_its_launcher_dies(
    start: Start, number: signal.Signals
) -> None:
    program = start(
        f"ledger.Diary(run).ended('saved', 75, 'saved at step 12'); os.kill(os.getpid(), {number})"
    )
    code, out = program.end()
    assert (code, out.count("begun"), "killed" in out) == (75, 1, False)
    state = ledger.read_state(program.run)
    assert state is not None
    assert (state.phase, state.exit_code, state.headline) == ("saved", 75, "saved at step 12")
    assert [event.name for event in ledger.events(program.run)] == ["running", "saved"]


def test_the_end_of_an_earlier_start_is_not_this_one_s(start: Start) -> None:
    program = start(
        "if started_before: return 0\n"
        "ledger.time.time = lambda: 1000.0\n"
        "ledger.Diary(run).ended('saved', 75, 'saved at step 12'); os.kill(os.getpid(), 9)"
    )
    assert program.end()[0] == 0


def test_a_warning_that_nobody_can_heed_yet_does_nothing(start: Start) -> None:
    shown = "import signal as s; print(s.getsignal(s.SIGUSR1) is s.SIG_DFL)"
    program = start(
        "for one in (signal.SIGUSR1, signal.SIGUSR2): os.kill(os.getpid(), one)\n"
        f"subprocess.run([sys.executable, '-c', {shown!r}])\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGUSR1)"
    )
    code, out = program.end()
    # Those that it starts do not inherit that; and one that dies of it was asked to end.
    assert (code, out.count("begun"), "True\n" in out) == (75, 1, True)
    state = ledger.read_state(program.run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("stopped", 75)


def test_what_cannot_be_ended_is_given_up_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that waits for a disk which does not answer."""
    said: list[str] = []
    run = create(tmp_path, "guarded")
    spec = JobSpec(name="x", command=("x.py",), folder="/")
    monkeypatch.setattr(guardian, "_GONE_WITHIN_S", 0.1)
    monkeypatch.setattr(guardian, "_reap", lambda: True)
    monkeypatch.setattr(sweep, "send", lambda *_: None)  # whatever else this process has started
    guardian._Guardian(run, spec, said.append)._end_what_is_left()
    assert len(said) == 1
    assert "given up" in said[0]
    asked = guardian._Guardian(run, spec, said.append)
    monkeypatch.setattr(guardian, "_GONE_WITHIN_S", 60.0)

    def told_to_end_meanwhile() -> bool:
        asked._pass_on(signal.SIGTERM, None)
        return True

    monkeypatch.setattr(guardian, "_reap", told_to_end_meanwhile)
    asked._end_what_is_left()
    assert len(said) == 1


def test_stop_means_for_good(start: Start) -> None:
    program = start(FOREVER)
    launcher = program.launcher()
    guardian.stop_for_good(program.run)
    os.kill(launcher, signal.SIGKILL)
    assert program.end()[0] == 130


def test_while_it_starts_again_the_run_is_alive_and_can_be_stopped(start: Start) -> None:
    # The second restart comes after a pause.
    program = start(FOREVER, before=LONG_PAUSES)
    for _ in range(2):
        os.kill(program.launcher(), signal.SIGKILL)
    program.read(
        "muster: the launcher was killed (SIGKILL); starting again in 600 s (restart 2 of 3)"
    )
    job, state = ledger.read_job(program.run), ledger.read_state(program.run)
    assert job is not None
    assert state is not None
    assert (job.launcher.pid, state.phase) == (program.process.pid, "starting")
    process = job.launcher.process()
    assert process is not None
    process.terminate()
    code, out = program.end()
    assert (code, "begun" in out) == (130, False)


def test_the_launcher_is_asked_to_end_when_the_guardian_is_killed(start: Start) -> None:
    program = start(POLITE)
    launcher = psutil.Process(program.launcher())
    program.read("ready")
    program.process.kill()
    program.read("got SIGTERM")
    until = time.monotonic() + GIVE_UP_S
    while not has_ended(launcher):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_stop_that_was_asked_for_before_does_not_count_for_another_start(start: Start) -> None:
    run = create(start.folder / "runs", "guarded")
    guardian.stop_for_good(run)
    program = start("if not started_before: os.kill(os.getpid(), 9)\nreturn 5", run=run)
    assert program.end()[0] == 5
