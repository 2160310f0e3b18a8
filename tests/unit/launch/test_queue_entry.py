"""What the owner of a queued job chose, and when a run ends."""

import json
import os
from pathlib import Path

import pytest

from torchmuster.devices.tickets import HIGHEST_PRIORITY
from torchmuster.errors import DependencyFailed, Impossible
from torchmuster.launch.history.queue_entry import (
    QUEUE_FILE,
    JobInQueue,
    QueueEntry,
    change_queue_entry,
    forget_submission,
    read_queue_entry,
    read_submissions,
    remember_submission,
    unfinished_runs,
    write_queue_entry,
)
from torchmuster.launch.history.run_end import expected_end
from torchmuster.launch.history.run_state import EventLog
from torchmuster.runfolder import RunFolder, create_run_folder

ENTRY = QueueEntry(since_unix_s=1e9, ready_unix_s=1e9)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "train")


def test_a_released_job_counts_its_waiting_time_from_the_release(run: RunFolder) -> None:
    write_queue_entry(run, ENTRY)
    change_queue_entry(run, held=True)
    job = JobInQueue(run, ENTRY)
    assert job().held
    change_queue_entry(run, held=False)
    assert not job().held
    assert job().ready_unix_s > job().since_unix_s == 1e9


def test_a_run_without_an_entry_cannot_be_changed(run: RunFolder) -> None:
    with pytest.raises(Impossible):
        change_queue_entry(run, priority=1)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"since_unix_s": "x"}', '{"since_unix_s": 1e400}', "[" * 10000]
)
def test_a_damaged_entry_counts_as_none(run: RunFolder, content: str) -> None:
    (run.path / QUEUE_FILE).write_text(content)
    assert read_queue_entry(run) is None


def test_priorities_have_bounds(run: RunFolder) -> None:
    content = vars(ENTRY) | {"priority": 10**12}
    (run.path / QUEUE_FILE).write_text(json.dumps(content))
    entry = read_queue_entry(run)
    assert entry is not None
    assert entry.priority == HIGHEST_PRIORITY


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")
def test_an_entry_of_another_user_is_not_read(run: RunFolder) -> None:
    write_queue_entry(run, ENTRY)
    os.chown(run.path / QUEUE_FILE, 1, 1)
    assert read_queue_entry(run) is None


@pytest.mark.parametrize(
    ("phase", "code", "waits"),
    [("finished", 0, False), ("saved", 75, True), ("running", None, True)],
)
def test_a_job_waits_for_runs_that_can_still_finish(
    run: RunFolder, phase: str, code: int | None, waits: bool
) -> None:
    log = EventLog(run)
    if code is None:
        log.phase(phase)
    else:
        log.ended(phase, code, phase)
    assert unfinished_runs([str(run.path)]) == ((run.id,) if waits else ())


@pytest.mark.parametrize("phase", ["failed", "stopped"])
def test_a_run_that_did_not_finish_cancels_the_job(run: RunFolder, phase: str) -> None:
    EventLog(run).ended(phase, 1, "rank 3 failed")
    with pytest.raises(DependencyFailed) as caught:
        unfinished_runs([str(run.path)])
    assert run.id in caught.value.what
    assert "rank 3" in caught.value.why


def test_a_run_that_a_reboot_ended_in_the_queue_can_still_finish(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember_submission(run, ["run", "a.py"], {})
    EventLog(run).ended("stopped", 143, "stopped on request (SIGTERM)")
    assert unfinished_runs([str(run.path)]) == (run.id,)
    forget_submission(run)
    with pytest.raises(DependencyFailed):
        unfinished_runs([str(run.path)])


def test_a_run_that_is_gone_cancels_the_job(tmp_path: Path) -> None:
    with pytest.raises(DependencyFailed):
        unfinished_runs([str(tmp_path / "nothing")])


def test_submissions_are_private_and_have_no_secrets(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_queue_entry(run, ENTRY)
    remember_submission(run, ["run", "a.py"], {"PATH": "/bin", "WANDB_API_KEY": "hunter2"})
    (stored,) = (tmp_path / "state" / "torchmuster" / "queue").iterdir()
    assert stored.stat().st_mode & 0o077 == 0
    assert "hunter2" not in stored.read_text()
    (known,) = read_submissions()
    assert (known.run.id, known.arguments, known.folder) == (
        run.id,
        ("run", "a.py"),
        str(Path.cwd()),
    )
    assert known.environment == {"PATH": "/bin"}
    forget_submission(run)
    assert read_submissions() == []


def test_the_end_of_a_run_follows_from_its_progress(run: RunFolder) -> None:
    assert expected_end(run) is None
    run.config.write_text("train:\n  steps: 100\n")
    assert expected_end(run) is None
    lines = [{"step": step, "at_unix_s": 1e9 + 2 * step} for step in range(1, 21)]
    (run.metrics / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert expected_end(run) == 1e9 + 200


@pytest.mark.parametrize("content", ["", "[" * 10000, "train: {steps: 1e99}", "\x00"])
def test_a_damaged_run_folder_has_no_expected_end(run: RunFolder, content: str) -> None:
    run.config.write_text(content)
    (run.metrics / "steps.jsonl").write_text(content)
    assert expected_end(run) is None
