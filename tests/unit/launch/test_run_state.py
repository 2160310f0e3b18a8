"""What the folder of a run says of it is true, also when its launcher was killed."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from torchmuster.errors import Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.job import Host, JobSpec, Limits
from torchmuster.runfolder import RunFolder, create_run_folder

SPEC = JobSpec(
    name="train",
    command=("train.py", "--api-key", "s3cr3t-value", "--lr", "1"),
    folder="/home/ana",
    hosts=(Host(name="a"), Host(name="b", ranks=4)),
    environment={"HF_TOKEN": "hf_aaaaaaaaaaaaaaaaaaaaaaaa", "NCCL_DEBUG": "INFO"},
    limits=Limits(grace_s=60.0),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "train")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that can be a launcher."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def written_by(run: RunFolder, launcher: run_state.Launcher) -> None:
    content = json.loads(run.job.read_text())
    run.job.write_text(json.dumps({**content, "launcher": msgspec.to_builtins(launcher)}))


def launcher_of(process: psutil.Process) -> run_state.Launcher:
    start_s = run_state._start_s(process.pid)
    return run_state.Launcher(host=socket.gethostname(), pid=process.pid, start_s=start_s)


def phase(run: RunFolder) -> str | None:
    state = run_state.read_state(run)
    return None if state is None else state.phase


def test_what_was_launched_is_read_again_without_its_secrets(run: RunFolder) -> None:
    assert run_state.read_job(run) is None
    run_state.write_job(run, SPEC, token="0123")
    job = run_state.read_job(run)
    assert job is not None
    assert job.command == ["train.py", "--api-key", "[redacted]", "--lr", "1"]
    assert (job.folder, job.hosts, job.token) == ("/home/ana", ["a", "b:4"], "0123")
    assert (job.grace_s, job.slurm_job) == (60.0, None)
    assert job.launcher.pid == os.getpid()
    assert job.launcher.is_of_this_machine
    assert "s3cr3t-value" not in run.job.read_text()
    assert "hf_aaaa" not in run.job.read_text()
    assert json.loads(run.job.read_text())["spec"]["environment"]["NCCL_DEBUG"] == "INFO"


def test_phases_and_the_end(run: RunFolder) -> None:
    run_state.write_job(run, SPEC)
    event_log = run_state.EventLog(run)
    assert phase(run) is None
    for name in ("joining", "starting", "running"):
        event_log.phase(name)
        state = run_state.read_state(run)
        assert state is not None
        assert (state.phase, state.active, state.exit_code) == (name, True, None)
    event_log.ended("failed", 1, "rank 1 failed")
    state = run_state.read_state(run)
    assert state is not None
    assert (state.phase, state.active, state.exit_code) == ("failed", False, 1)
    assert state.headline == "rank 1 failed"
    assert state.started_unix_s <= state.since_unix_s <= time.time()


def test_a_run_whose_launcher_was_killed_has_died(
    run: RunFolder, other: "subprocess.Popen[bytes]"
) -> None:
    run_state.write_job(run, SPEC)
    written_by(run, launcher_of(psutil.Process(other.pid)))
    run_state.EventLog(run).phase("running")
    assert phase(run) == "running"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert phase(run) == "died"  # a zombie is not alive
    other.wait()
    state = run_state.read_state(run)
    assert state is not None
    assert (state.phase, state.active, state.headline) == ("died", False, "the launcher was killed")
    os.utime(run.job, (state.since_unix_s + 90, state.since_unix_s + 90))  # its last sign of life
    later = run_state.read_state(run)
    assert later is not None
    assert later.since_unix_s == pytest.approx(state.since_unix_s + 90, abs=1)


def test_a_run_that_died_is_launched_again_with_the_death_in_its_events(
    run: RunFolder, other: "subprocess.Popen[bytes]"
) -> None:
    run_state.write_job(run, SPEC)
    written_by(run, launcher_of(psutil.Process(other.pid)))
    run_state.EventLog(run).phase("running")
    other.kill()
    other.wait()
    run.console.write_text("step 1\n")
    an_hour_later = time.time() + 3600
    os.utime(run.console, (an_hour_later, an_hour_later))
    run_state.EventLog(run).phase("joining")
    died = run_state.read_events(run)[2]
    assert died.name == "died"
    assert died.at_unix_s == pytest.approx(an_hour_later, abs=1)  # its last sign of life


def test_events_add_up_to_restarts_resumes_and_a_hang_that_is_not_over() -> None:
    def summary(*names: str) -> tuple[int, int | None, bool]:
        events = [
            run_state.RunEvent(at_unix_s=1.0, name=name, facts={"from_step": 7}) for name in names
        ]
        found = run_state.RunState.of(events)
        assert found is not None
        return found.restarts, found.resumed_from, found.hang is not None

    assert summary("running", "hang") == (0, None, True)
    assert summary("running", "hang", "hang-over") == (0, None, False)
    assert summary("running", "hang", "restart", "running") == (1, 7, False)
    assert summary("died", "resumed") == (0, 7, False)


def test_a_later_process_with_the_same_number_is_not_the_launcher(
    run: RunFolder, other: "subprocess.Popen[bytes]"
) -> None:
    run_state.write_job(run, SPEC)
    launcher = launcher_of(psutil.Process(other.pid))
    run_state.EventLog(run).phase("running")
    earlier = msgspec.structs.replace(launcher, start_s=launcher.start_s - 60)
    written_by(run, earlier)
    assert earlier.process() is None
    assert phase(run) == "died"


def test_a_launcher_on_another_machine_is_known_by_what_was_heard_of_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_state.write_job(run, SPEC)
    elsewhere = run_state.Launcher(host="login-1", pid=os.getpid(), start_s=0.0)
    written_by(run, elsewhere)
    run_state.EventLog(run).phase("running")
    assert elsewhere.process() is None
    an_hour = time.time() + 3600
    monkeypatch.setattr("time.time", lambda: an_hour)  # of this machine; the disk's is another
    assert phase(run) == "running"
    monkeypatch.undo()
    heard = time.time() - 2.5 * 3600
    os.utime(run.job, (heard, heard))
    state = run_state.read_state(run)
    assert state is not None
    assert state.phase == "died"
    assert state.since_unix_s == pytest.approx(heard, abs=1)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"phase": "running"}', "\x00" * 9])
def test_a_damaged_file_is_no_state_and_no_job(run: RunFolder, content: str) -> None:
    run.events.write_text(content)
    run.job.write_text(content)
    assert run_state.read_state(run) is None
    assert run_state.read_job(run) is None


def test_the_end_of_a_run_is_logged_also_when_it_had_too_many_events(run: RunFolder) -> None:
    event_log = run_state.EventLog(run)
    event_log.phase("running")
    run_state.log_event(run, run_state.HANG, what="rank 1 keeps the others waiting")
    with run.events.open("ab") as stream:
        stream.write(b"{}\n" * (run_state._LARGEST_FILE_BYTES // 3 + 2))
    run_state.log_event(run, run_state.HANG_OVER, what="rank 1 continues")
    event_log.ended("finished", 0, "finished")
    state = run_state.read_state(run)
    assert state is not None
    assert (state.phase, state.hang) == ("finished", None)


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(run: RunFolder) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(Impossible) as refusal:
        run_state.write_job(run, SPEC)
    assert str(run.path) in refusal.value.what
    assert "--runs DIR" in refusal.value.fix


def test_a_disk_that_fills_up_during_a_run_does_not_end_it(run: RunFolder) -> None:
    event_log = run_state.EventLog(run)
    shutil.rmtree(run.path)
    event_log.phase("running")
    event_log.ended("finished", 0, "finished")
    assert not run.path.exists()
