"""DeepSpeed and torchtitan under ``muster run``, in an environment of their own.

Apart from the other libraries: with DeepSpeed installed, Accelerate imports it (10 s), and torchtitan needs triton (1 GB).
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
_WITHIN_S = 1200

pytestmark = [pytest.mark.stress, pytest.mark.timeout(2 * _WITHIN_S), pytest.mark.integrations]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the libraries; return the folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("libraries") / "env"
    uv = ROOT / "scripts" / "uv"
    subprocess.run([uv, "venv", folder], check=True)
    pinned = ["--constraints", str(ROOT / ".ci" / "constraints.txt")]
    version = torch.__version__.partition("+")[0]
    wanted = [f"torch=={version}", "setuptools", "deepspeed", "torchtitan", "triton"]
    into = ["--python", str(folder / "bin" / "python")]
    subprocess.run([uv, "pip", "install", *into, *pinned, *wanted, "-e", ROOT], check=True)
    return folder / "bin"


def call(programs: Path, folder: Path, *command: str) -> str:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


def lines(folder: Path, file: str) -> list[dict[str, Any]]:
    (run,) = (folder / "runs").iterdir()
    return [json.loads(line) for line in (run / "metrics" / file).read_text().splitlines()]


def printed_losses(text: str) -> list[tuple[str, str]]:
    return sorted(re.findall(r"step (\d+) loss ([\d.]+)", text))


def test_deepspeed_has_torchrun_s_losses_and_its_checkpoints(
    programs: Path, tmp_path: Path
) -> None:
    script = str(SCRIPTS / "deepspeed_zero.py")
    plain, ours = tmp_path / "torchrun", tmp_path / "muster"
    plain.mkdir()
    ours.mkdir()
    expected = call(programs, plain, "torchrun", "--nproc-per-node=2", script)
    printed = call(programs, ours, "muster", "run", "--nproc-per-node=2", script)
    assert len(printed_losses(printed)) == 2 * 25
    assert printed_losses(printed) == printed_losses(expected)
    losses = {line["step"]: line["loss"] for line in lines(ours, "steps.jsonl") if "loss" in line}
    assert sorted(losses) == list(range(1, 26))
    assert ("25", str(losses[25])) in printed_losses(printed)
    assert [
        (one["library"], one["step"], Path(one["path"]).name) for one in lines(ours, "saves.jsonl")
    ] == [("deepspeed", 10, "global_step10"), ("deepspeed", 20, "global_step20")]


def test_deepspeed_resumes_after_a_failure(programs: Path, tmp_path: Path) -> None:
    script = (str(SCRIPTS / "deepspeed_zero.py"), "--fail-at", "15")
    how = ("--nproc-per-node=2", "--max-restarts=1", "--resume-with=--resume")
    printed = call(programs, tmp_path, "muster", "run", *how, *script)
    steps = [int(step) for step, _ in re.findall(r"\[rank 0\] step (\d+) loss ([\d.]+)", printed)]
    assert steps == [*range(1, 16), *range(11, 26)]
    assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == list(range(1, 26))


def test_torchtitan_s_losses_are_recorded(programs: Path, tmp_path: Path) -> None:
    script = str(SCRIPTS / "torchtitan_metrics.py")
    call(programs, tmp_path, "muster", "run", "--ranks=1", script)
    found = lines(tmp_path, "steps.jsonl")
    assert [(one["step"], one["loss"], one["loss_max"]) for one in found] == [
        (1, 2.5, 3.5),
        (2, 1.5, 2.5),
    ]
    assert found[0]["gradient_norm"] == 0.5
