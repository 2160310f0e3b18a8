"""Scripts of every library under ``muster run``: their steps, losses, evaluations and checkpoints are in the run folder.

The scripts are in ``library_scripts/``; none of them imports torchmuster, except for the one that shows ``torchmuster.log``.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from muster_command import Muster
from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "library_scripts"
_WITHIN_S = 3 * GIVE_UP_S  # two ranks import a large library, next to other tests
TWO = ("--device", "cpu", "--ranks", "2")


class Ran:
    """A finished run: what it printed, and the lines of its metrics."""

    def __init__(self, folder: Path, printed: str) -> None:
        (self.run,) = (folder / "runs").iterdir()
        self.printed = printed

    def lines(self, file: str) -> list[dict[str, Any]]:
        path = self.run / "metrics" / f"{file}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("steps") if "loss" in line}

    def saves(self) -> list[tuple[str, int, str]]:
        return [
            (one["library"], one["step"], Path(one["path"]).name) for one in self.lines("saves")
        ]


def run(muster: Muster, folder: Path, name: str) -> Ran:
    done = muster("run", *TWO, str(SCRIPTS / name), timeout_s=_WITHIN_S)
    assert done.code == 0, done.err + done.out
    return Ran(folder, done.out)


def printed_losses(printed: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", printed)
    }


def test_a_plain_script(muster: Muster, tmp_path: Path) -> None:
    ran = run(muster, tmp_path, "plain.py")
    assert ran.losses() == printed_losses(ran.printed)
    assert sorted(ran.losses()) == [1, 5, 9, 13]
    last = ran.lines("steps")[-1]
    assert last["step"] == 16
    assert last["learning_rate"] == 0.1
    assert 0 <= last["data_share"] <= 1
    assert last["memory_peak_bytes"] > 0
    assert ran.lines("steps")[1]["samples"] == 4 * 8 * 2
    assert ran.saves() == [("torch.save", 8, "checkpoint.pt"), ("torch.save", 16, "checkpoint.pt")]
    assert ran.lines("evaluations") == []


@pytest.mark.integrations
def test_transformers(muster: Muster, tmp_path: Path) -> None:
    ran = run(muster, tmp_path, "hf_trainer.py")
    told = re.findall(r"'loss': '?([\d.]+)", ran.printed)
    assert sorted(ran.losses()) == [4, 8, 12]
    for loss, printed in zip(ran.losses().values(), told, strict=True):
        assert math.isclose(loss, float(printed), rel_tol=1e-3)
    with_loss = [line for line in ran.lines("steps") if "loss" in line]
    assert with_loss[0]["gradient_norm"] > 0
    assert ran.saves() == [
        ("transformers", 6, "checkpoint-6"),
        ("transformers", 12, "checkpoint-12"),
    ]
    (evaluation,) = ran.lines("evaluations")
    assert evaluation["step"] == 12
    assert evaluation["loss"] > 0


@pytest.mark.integrations
def test_lightning(muster: Muster, tmp_path: Path) -> None:
    ran = run(muster, tmp_path, "lightning_trainer.py")
    assert sorted(ran.losses()) == [4, 8, 12, 16]
    assert [one[:2] for one in ran.saves()] == [("lightning", 8), ("lightning", 16)]
    assert [(one["step"], "val_loss" in one) for one in ran.lines("evaluations")] == [
        (8, True),
        (16, True),
    ]


@pytest.mark.integrations
def test_accelerate(muster: Muster, tmp_path: Path) -> None:
    ran = run(muster, tmp_path, "accelerate_loop.py")
    assert ran.losses() == printed_losses(ran.printed)
    assert ran.saves() == [("accelerate", 8, "first"), ("accelerate", 16, "second")]


@pytest.mark.nightly
def test_recording_can_be_switched_off(muster: Muster, tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain.py")
    switch = ("--env", "TORCHMUSTER_RECORD=0")
    done = muster("run", *TWO, *switch, script, timeout_s=_WITHIN_S)
    assert done.code == 0
    assert Ran(tmp_path, done.out).lines("steps") == []
