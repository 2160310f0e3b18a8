"""What ``muster explain`` says of runs in every state, of torn folders, and of folders from elsewhere."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from script_checkpoints import cut, record, torch_file
from torchmuster.cli import explain
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.root_cause import NodeExit
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder, create_run_folder
from typed_options import options_from

Explain = Callable[..., str]
HANG = Finding(
    name="rank-elsewhere",
    status=Status.WARNING,
    what="rank 3 on b keeps the others waiting: in DataLoader.__next__ for 94 s",
    why="its process uses no CPU",
    fix="check what the loader reads on b",
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run_folder(tmp_path / "runs", "train")
    run_state.write_job(
        run, JobSpec(name="train", command=("train.py", "--lr", "1"), folder="/work")
    )
    return run


@pytest.fixture
def explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Explain:
    monkeypatch.setenv("COLUMNS", "200")

    def say(*words: str) -> str:
        runs = str(tmp_path / "runs")
        assert explain.run(options_from(explain.ExplainOptions, "--runs", runs, *words)) == 0
        return capsys.readouterr().out

    return say


def found(explained: Explain, *words: str) -> dict[str, dict[str, str]]:
    """Return the findings by their names."""
    return {one["name"]: one for one in json.loads(explained(*words, "--json"))["findings"]}


def failed(run: RunFolder, *, attempt: int = 0, rank: int = 1) -> Finding:
    failure = protocol.Failure(rank=rank, exit_code=1, ago_s=0.0, error="ValueError: no")
    run.rank_log(rank).write_text("ValueError: no\n")
    finding = Finding(
        name="rank-failed",
        status=Status.FAILURE,
        what=headline(rank),
        why="raised at train.py:7",
        fix="mend it",
        evidence=f"Traceback …\nlog: logs/rank-{rank}.log",
    )
    ended = protocol.Ended(attempt=attempt, good=False, failures=(failure,))
    evidence.log_failure(
        run, attempt, finding, [NodeExit(host="a", ended=ended, ended_s=time.monotonic())]
    )
    return finding


def hangs(run: RunFolder) -> Path:
    """Report and record a hang; return its folder."""
    folder = evidence.new_hang(run)
    assert folder is not None
    evidence.log_hang(run, HANG, folder)
    return folder


def headline(rank: int = 1) -> str:
    return f"rank {rank} on a failed: ValueError: no"


def of_another_machine(run: RunFolder) -> None:
    job = json.loads(run.job.read_text())
    job["launcher"]["host"] = "far-away"
    run.job.write_text(json.dumps(job))


def killed(run: RunFolder) -> None:
    job = json.loads(run.job.read_text())
    job["launcher"] |= {"pid": 2**22 - 1, "start_s": 1.0}
    run.job.write_text(json.dumps(job))


def test_a_failed_run_has_its_story_cause_fix_and_files(run: RunFolder, explained: Explain) -> None:
    event_log = run_state.EventLog(run, command=["train.py", "--lr", "1"])
    event_log.phase("running")
    run_state.log_event(run, "started", what="2 ranks started: a 2")
    failed(run, attempt=0, rank=0)
    run_state.log_event(run, run_state.RESTART, what=f"{headline(0)}; restarted from step 40")
    finding = failed(run, attempt=1)
    event_log.ended("failed", 1, headline(), finding=finding)
    said = explained("last")
    assert said.startswith(f"run {run.id}\n")
    assert f"\nfailure  {headline()}\n" in said
    assert "fix  mend it\n" in said


def test_a_hang_shortly_before_a_failure_is_told_with_its_cause(
    run: RunFolder, explained: Explain
) -> None:
    event_log = run_state.EventLog(run)
    event_log.phase("running")
    hangs(run)
    event_log.ended("failed", 1, headline(), finding=failed(run))
    told = found(explained)["rank-failed"]
    assert told["what"] == headline()
    assert f"reported shortly before: {HANG.what}" in told["why"]


def test_the_cause_of_an_earlier_launch_is_not_told_as_that_of_the_last(
    run: RunFolder, explained: Explain
) -> None:
    """A run that was refused is explained by its words."""
    run_state.EventLog(run).ended("failed", 1, headline(), finding=failed(run))
    event_log = run_state.EventLog(run)
    event_log.phase("joining")
    event_log.ended("failed", 2, "b: there is no such script")
    assert found(explained)["run-failed"]["what"] == "b: there is no such script"
    assert "raised at train.py:7" not in explained()


def test_a_hang_that_goes_on_is_told_of_a_running_run(run: RunFolder, explained: Explain) -> None:
    event_log = run_state.EventLog(run)
    event_log.phase("starting")
    event_log.phase("running")
    folder = hangs(run)
    (folder / "rank-3.stacks.txt").write_text("stacks")
    said = explained()
    assert f"\nwarning  {HANG.what}\n" in said
    assert "\nok       running; launched " in said
    assert "  hang/1/rank-3.stacks.txt\n" in said
    run_state.log_event(run, "hang-over", what="rank 3 continues after a hang of 99 s")
    said = explained()
    assert "warning" not in said
    assert "rank 3 continues after a hang of 99 s" in said


@pytest.mark.parametrize("phase", ["submitted", "joining", "starting"])
def test_a_hang_of_an_earlier_attempt_is_not_told_as_one_of_now(
    run: RunFolder, explained: Explain, phase: str
) -> None:
    hangs(run)
    run_state.EventLog(run).phase(phase)
    assert "warning" not in explained()


def test_the_hang_before_a_stop_is_told(run: RunFolder, explained: Explain) -> None:
    hangs(run)
    run_state.EventLog(run).ended("stopped", 130, "stopped on request")
    said = explained()
    assert f"\nwarning  {HANG.what}\n" in said
    assert "\nnote     stopped on request\n" in said


@pytest.mark.parametrize(
    ("phase", "headline", "what"),
    [
        ("finished", "finished", "ok       finished in "),
        (
            "saved",
            "saved step 40 at a request to end",
            "ok       saved step 40 at a request to end",
        ),
    ],
)
def test_runs_that_ended_well(
    run: RunFolder, explained: Explain, phase: str, headline: str, what: str
) -> None:
    failed(run)
    run_state.log_event(run, run_state.RESTART, what="it failed; restarted", from_step=None)
    run_state.EventLog(run).ended(phase, 0, headline)
    said = explained()
    assert f"\n{what}" in said
    if phase == "finished":
        assert "after 1 failed attempt\n" in said


def test_a_launcher_that_was_killed_is_told_with_what_was_known(
    run: RunFolder, explained: Explain
) -> None:
    run_state.EventLog(run).phase("running")
    failed(run)
    killed(run)
    findings = found(explained)
    assert findings["launcher-killed"]["status"] == "failure"
    assert "muster stop" not in findings["launcher-killed"]["fix"]  # its ranks were stopped
    assert findings["rank-failed"]["what"] == f"attempt 1 had failed: {headline()}"
    assert "died: the launcher was killed" in explained()


def test_a_killed_training_is_told_how_to_go_on(run: RunFolder, explained: Explain) -> None:
    spec = JobSpec(
        name="x", command=("torchmuster.worker",), folder="/work", module=True, typed=("train",)
    )
    run_state.write_job(run, spec)
    run_state.EventLog(run).phase("running")
    killed(run)
    assert f"muster train --resume {run.path}" in explained()


def test_of_a_folder_from_elsewhere_it_is_said_what_cannot_be_seen(
    run: RunFolder, explained: Explain, tmp_path: Path
) -> None:
    run_state.EventLog(run).phase("running")
    of_another_machine(run)
    copy = tmp_path / "copy" / run.id
    shutil.copytree(run.path, copy)
    active = found(explained, str(copy))["run-active"]
    assert "the last heartbeat of the launcher on far-away is " in active["what"]
    long_ago = time.time() - 7210
    os.utime(copy / "job.json", (long_ago, long_ago))
    gone = found(explained, str(copy))["launcher-gone"]
    assert gone["status"] == "failure"
    assert "far-away for 2 h" in gone["what"]


@pytest.mark.parametrize("left", [(), ("events.jsonl", "job.json", "logs", "hang")])
def test_torn_folders_are_explained_as_far_as_they_go(
    run: RunFolder, explained: Explain, left: tuple[str, ...]
) -> None:
    run_state.EventLog(run).phase("running")
    for name in ("job.json", "events.jsonl"):
        (run.path / name).write_text('{"half')
    for name in left:
        path = run.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    findings = found(explained, str(run.path))
    assert findings["run-unknown"]["status"] == "note"


def test_json_has_it_all(run: RunFolder, explained: Explain) -> None:
    run_state.EventLog(run).ended("failed", 1, headline(), finding=failed(run))
    told = json.loads(explained("--json"))
    assert (told["id"], told["phase"], told["exit_code"]) == (run.id, "failed", 1)
    assert told["findings"][0]["what"] == headline()
    assert told["moments"][-1]["what"] == f"failed: {headline()}"


def test_how_a_script_resumes(run: RunFolder, explained: Explain, tmp_path: Path) -> None:
    """From its newest complete checkpoint; the torn one is named, wherever it is."""
    event_log = run_state.EventLog(run)
    for step in (10, 20):
        path = torch_file(tmp_path / "checkpoints" / f"step={step}.ckpt")
        os.utime(path, (time.time() - 100, time.time() - 100))
        record(run, path, step, library="lightning", at_unix_s=time.time() - 90 + step)
    cut(path)
    event_log.ended("failed", 1, headline(1), finding=failed(run))
    findings = found(explained)
    assert list(findings) == ["rank-failed", "checkpoint-to-resume"]
    told = findings["checkpoint-to-resume"]
    older = tmp_path / "checkpoints" / "step=10.ckpt"
    assert f"muster run train.py --lr 1 --ckpt_path {older}\n" in told["fix"]
    assert f"not used: {path} is torn: " in told["why"]


def test_a_script_that_finished_need_not_resume(
    run: RunFolder, explained: Explain, tmp_path: Path
) -> None:
    record(run, torch_file(tmp_path / "last.pt"), 10, library="torch.save", at_unix_s=time.time())
    run_state.EventLog(run).ended("finished", 0, "finished")
    assert list(found(explained)) == ["run-finished"]
