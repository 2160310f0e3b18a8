"""``muster train --resume`` before anything starts: which run goes on, and what it refuses."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from made_up_runs import add_event
from muster_command import Muster, Result
from torchmuster.checkpoints.manifest import Manifest, commit_checkpoint, new_name
from torchmuster.checkpoints.store import open_store
from torchmuster.cli import output, resumed_run
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import with_absolute_folder
from torchmuster.config.written import settings_yaml
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.node import process_cleanup
from torchmuster.runfolder import RunFolder, create_run_folder

pytestmark = pytest.mark.slow

Resume = Callable[..., Result]
GIVEN = {
    "model.build": "mine:model",
    "data.dataset": "mine:data",
    "train.steps": "10",
    "train.schedule": "cosine",
}


def made(root: Path, phase: str, *, saved: bool = True, **settings: str) -> RunFolder:
    """Make a run of muster train, as it was left."""
    (root / "mine.py").write_text("")
    run = create_run_folder(root / "runs", "train")
    given = {**GIVEN, **{name.replace("__", "."): text for name, text in settings.items()}}
    flags = [Flag(flag="--set", path=path, text=text) for path, text in given.items()]
    run.config.write_text(settings_yaml(resolve_settings(flags=flags)))
    spec = JobSpec(name="train", command=("x",), folder=str(root), device="cpu", ranks=3)
    run_state.write_job(run, spec)
    if phase != "running":  # then it was launched by a process that is no more
        job = json.loads(run.job.read_text())
        gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "start_s": 1.0}
        run.job.write_text(json.dumps({**job, "launcher": gone}))
    add_event(run, phase, time.time())
    if saved:
        store, name = open_store(run.checkpoints), new_name(4)
        commit_checkpoint(
            store,
            Manifest(
                name=name,
                step=4,
                world_size=3,
                strategy="ddp",
                made_unix_s=0.0,
                files={},
            ),
        )
    return run


@pytest.fixture
def resume(muster: Muster, own_machine: Path) -> Resume:
    """Run ``muster train --resume``."""

    def call(*words: str) -> Result:
        result = muster("train", "--resume", *words, env={"COLUMNS": "400"})
        assert "Traceback" not in result.err
        return result

    return call


def command_of(done: Result) -> list[str]:
    """The command of a rank that a dry run shows."""
    return shlex.split(done.out.splitlines()[-2])


def test_it_goes_on_in_its_folder_with_its_settings_device_and_ranks(
    resume: Resume, own_machine: Path
) -> None:
    run = made(own_machine, "stopped")
    done = resume("last", "--dry-run", "--set", "train.steps=20")
    assert done.code == 0, done
    command = command_of(done)
    assert done.out.startswith("this host: 3 ranks\n")
    assert command[-4:] == ["--device", "cpu", "--run-folder", str(run.path)]
    assert "train.steps=20" in command
    assert "model.build=mine:model" in command
    fewer = resume(run.id, "--ranks", "2", "--dry-run")
    assert (fewer.out.splitlines()[0], fewer.err) == ("this host: 2 ranks", "")


def test_a_relative_folder_means_the_one_that_the_run_began_in(
    muster: Muster, own_machine: Path
) -> None:
    words = ("--config", str(made(own_machine, "failed").config), "--dry-run")
    done = muster("train", *words, "--device", "cpu", "--set", "checkpoint.folder=saves")
    assert done.code == 0, done
    assert f"checkpoint.folder={own_machine / 'saves'}" in command_of(done)
    kept = {"s3://a/b": "s3://a/b", "~/x": str(Path.home() / "x"), "/y": "/y"}
    for given, meant in kept.items():
        flag = Flag(flag="--set", path="checkpoint.folder", text=given)
        settings = with_absolute_folder(resolve_settings(flags=[flag])).settings
        assert settings.checkpoint.folder == meant


def test_a_run_that_has_finished_says_so(resume: Resume, own_machine: Path) -> None:
    run = made(own_machine, "finished")
    done = resume("last")
    assert done.code == 0
    assert f"muster train --resume {run.id} --set train.steps=…\n" in done.err
    longer = resume("last", "--set", "train.steps=20", "--dry-run")
    assert "train.steps=20" in command_of(longer)


@pytest.mark.parametrize(
    "setting", ["train.seed=1", "train.learning_rate=0.5", "checkpoint.folder=/x"]
)
def test_what_would_be_another_training_is_refused(
    resume: Resume, own_machine: Path, setting: str
) -> None:
    run = made(own_machine, "failed")
    done = resume("last", "--set", setting)
    assert done.code == 2
    path = setting.partition("=")[0]
    config = run.config.relative_to(own_machine)
    assert done.err.endswith(f"muster train --config {config} --set {path}=…\n")


def test_a_run_that_cannot_go_on_says_why(resume: Resume, own_machine: Path) -> None:
    without = made(own_machine, "failed", saved=False, checkpoint__every="never")
    done = resume(without.id)
    assert done.code == 2
    assert f"muster train --config {without.config.relative_to(own_machine)}\n" in done.err
    script = create_run_folder(own_machine / "runs", "script")
    done = resume(script.id)
    assert done.code == 2
    assert script.id in done.err
    done = resume(script.id, "--config", "c.yaml")
    assert done.code == 2
    assert "--config c.yaml" in done.err
    at_work = made(own_machine, "running")
    done = resume(at_work.id)
    assert done.code == 3
    job = json.loads(at_work.job.read_text())
    job["launcher"]["host"] = "far-away"
    at_work.job.write_text(json.dumps(job))
    done = resume(at_work.id, "--dry-run")
    assert done.code == 3
    assert "far-away" in done.err
    os.utime(at_work.job, (1, 1))
    assert resume(at_work.id, "--dry-run").code == 0


def test_a_run_without_a_checkpoint_starts_from_step_0(resume: Resume, own_machine: Path) -> None:
    made(own_machine, "died", saved=False)
    done = resume("last", "--dry-run")
    assert done.code == 0


@contextlib.contextmanager
def process_of(run: RunFolder, code: str, **job: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that a killed launcher has left."""
    token = os.urandom(8).hex()
    run.job.write_text(json.dumps({**json.loads(run.job.read_text()), "token": token, **job}))
    env = {**os.environ, process_cleanup.TOKEN_VARIABLE: f"{token}.0"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=run.path, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_of_a_killed_launcher_may_finish_their_save(
    own_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(own_machine, "died")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (run.path / "go").touch()

    monkeypatch.setattr(output, "say", say)
    saves = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    with process_of(run, f"{saves}pathlib.Path('saved').touch()", grace_s=300):
        resumed_run._await_processes_left(run)
        assert (run.path / "saved").exists()


def test_processes_of_a_killed_launcher_that_do_not_exit_are_killed(
    resume: Resume, own_machine: Path
) -> None:
    run = made(own_machine, "died")
    with process_of(run, "while True: pass", grace_s=-9.5) as left:
        assert resume("last", "--dry-run").code == 0
        assert left.poll() is None, "a dry run kills nothing"
        resumed_run._await_processes_left(run)
        assert left.wait() == -signal.SIGKILL


def test_a_secret_that_was_not_written_down_is_asked_for(resume: Resume, own_machine: Path) -> None:
    address = "https://ana:hunter2@example.org/a.jsonl"
    made(own_machine, "failed", data__files=address, data__dataset="null", data__tokenizer="bytes")
    done = resume("last")
    assert done.code == 2
    assert "hunter2" not in done.err
    assert "--set data.files=…" in done.err
    words = ("--set", f"data.files={address}", "--dry-run")
    assert resume("last", *words).code == 0
