"""``muster prove`` on real scripts: planted faults are named, and healthy scripts are not accused.

The scripts and tables are in ``proved_scripts``. The default tier runs a few plain scripts; all others need minutes.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from muster_command import muster_argv
from nightly import nightly_except
from patience import GIVE_UP_S
from ranks.proved_scripts.faults import FAULTS, Fault
from ranks.proved_scripts.healthy import HEALTHY, Healthy

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(3 * GIVE_UP_S)]
SCRIPTS = Path(__file__).parent / "proved_scripts"
# The stop that shows a fault, if it is another one than SIGKILL of all ranks.
STOPS = {"torn-save": "save-killed", "sigterm-drops-gradients": "terminated"}


def prove(
    folder: Path, script: str, *flags: str, arguments: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """Prove a script in a folder; return the JSON and the exit code."""
    done = subprocess.run(
        muster_argv(["prove", "--json", *flags, script, *arguments]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3 * GIVE_UP_S,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert "results" in result, done.stdout
    assert "Traceback" not in done.stderr
    return result, done.returncode


def differences(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (one["name"].partition(".")[0], one["difference"]["kind"])
        for one in result["results"]
        if one["difference"] is not None
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, tmp_path)
    return tmp_path


def fault_name(fault: Fault) -> str:
    return "-".join([fault.script.removesuffix(".py"), fault.fault, *fault.arguments[1:2]])


@pytest.mark.parametrize(
    "fault",
    nightly_except(["plain-no-set-epoch"], {fault_name(fault): fault for fault in FAULTS}),
)
def test_a_fault_is_the_first_difference(folder: Path, fault: Fault) -> None:
    tested = fault.expected[0]
    if tested == "resume":
        tested = f"resume.{STOPS.get(fault.fault, 'killed')}"
    words = ("--only", tested, *fault.flags)
    arguments = ("--fault", fault.fault, *fault.arguments)
    result, code = prove(folder, fault.script, *words, arguments=arguments)
    assert differences(result)[:1] == [fault.expected]
    assert code == 1


def healthy_name(case: Healthy) -> str:
    words = [one for one in case.arguments if not one.startswith("--save")]
    return "-".join([Path(case.script).stem, *words, *case.flags[-1:], case.resume_with or ""])


@pytest.mark.nightly
@pytest.mark.parametrize("case", HEALTHY, ids=healthy_name)
def test_a_healthy_script_is_not_accused(folder: Path, case: Healthy) -> None:
    script = (SCRIPTS / case.script).resolve()
    for path in script.parent.glob("*.py"):
        shutil.copy(path, folder)
    properties = "determinism,ranks" if case.resume_with is None else "determinism,resume,ranks"
    words = ["--only", properties, "--steps", str(case.steps), *case.flags]
    if case.resume_with:
        words += ["--resume-with", case.resume_with]
    result, code = prove(folder, script.name, *words, arguments=case.arguments)
    assert differences(result) == []
    assert code == 0


STRATEGIES = {
    "ddp": {},
    "fsdp": {"distributed.strategy": "fsdp"},
    "accumulation": {"train.micro_batch_size": "1"},
    "bf16": {"train.precision": "bf16"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRATEGIES)
def test_muster_train_is_not_accused(tmp_path: Path, name: str) -> None:
    tiny_models.make_model(tmp_path / "model", "byte-level")
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": line * 3}) + "\n" for line in tiny_models.LINES * 4)
    )
    (tmp_path / "config.yaml").write_text(
        "model: {model_name_or_path: model}\n"
        "data: {files: train.jsonl, sequence_length: 16}\n"
        "train: {steps: 20, learning_rate: 0.01, global_batch_size: 4, micro_batch_size: 2}\n"
        "checkpoint: {every: 3}\n"
    )
    words = [
        word for path, value in STRATEGIES[name].items() for word in ("--set", f"{path}={value}")
    ]
    result, code = prove(tmp_path, "--steps", "12", *words, "config.yaml")
    assert differences(result) == []
    assert code == 0


def test_the_users_files_stay_as_they_are(folder: Path) -> None:
    """Also if the script writes into a folder that has the checkpoint of an earlier run."""
    (folder / "out").mkdir()
    kept = folder / "out" / "notes.txt"
    kept.write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result, code = prove(
        folder,
        "plain.py",
        *("--only", "resume.killed"),
        arguments=("--fault", "scheduler-lost"),
    )
    assert differences(result) == [("resume", "learning-rate")]
    assert code == 1
    found = result["results"][0]
    assert found["difference"]["line"].startswith("plain.py:")
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["notes.txt"]
    assert not list(folder.glob("prove/*/trials"))
    assert Path(result["report"]).is_file()


SAVES_LATE = """
import sqlite3, subprocess, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
subprocess.run(["sh", "-c", f"echo x > {sys.argv[1]}"])
try:
    sqlite3.connect(sys.argv[2]).execute("create table t (a)")
except sqlite3.OperationalError:
    pass
for step in range(30):
    model(torch.full((2, 4), step / 30)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 24:
        torch.save(model.state_dict(), "late.pt")
"""


def test_a_script_that_saves_late_is_run_until_then_and_its_children_write_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SAVES_LATE)
    paths = [tmp_path / "by-a-child", tmp_path / "by-sqlite"]
    flags = ("--ranks", "1", "--only", "determinism,resume.killed")
    result, code = prove(folder, "train.py", *flags, arguments=[str(path) for path in paths])
    assert result["steps"] == 30
    assert ("resume", "started-from-zero") in differences(result)
    assert code == 1
    if result["confined_by_kernel"]:
        assert not any(path.exists() for path in paths)


def test_a_write_outside_the_folder_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    script.write_text(f"open({str(mine)!r}, 'w')\n")
    done = subprocess.run(
        muster_argv(["prove", "train.py"]),
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 2
    assert str(mine) in done.stderr
    assert "--outputs" in done.stderr
    assert "run_recorded" not in done.stderr  # the traceback has the script's lines only
    assert mine.read_text() == "mine"
