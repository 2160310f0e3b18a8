"""A training that is interrupted and gone on with is the one that never stopped."""

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import resuming
from rank_programs.resuming import SAMPLES
from torchmuster.train.strategies.choose import Name

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_nothing_shows_that_a_training_was_interrupted(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    gone_on_from = {"ddp": 10, "fsdp": 7, "fp16": 5}
    for answer in run_ranks(resuming.exactly, ranks, tmp_path):
        assert answer.keys() == gone_on_from.keys()
        for title, ways in answer.items():
            straight, interrupted = ways["straight on"], ways["interrupted"]
            assert straight.pop("from") is None
            assert interrupted.pop("from") == gone_on_from[title]
            steps = [line["step"] for line in straight["steps"]]
            assert steps == list(range(1, 12))
            assert [line["step"] for line in straight["evaluations"]] == [3, 6, 9]
            for what, value in interrupted.items():
                assert value == straight[what], (title, what)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_odd_model_and_a_loader_of_ones_own_go_on_exactly(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    for answer in run_ranks(resuming.oddly, ranks, tmp_path):
        for name in ("single",) if ranks == 1 else ("ddp", "fsdp"):
            weights, seen, _ = answer[f"{name} straight on"]
            weights_of_parts, seen_in_parts, _ = answer[f"{name} in parts"]
            assert len(seen) == 10
            assert seen_in_parts == seen
            assert weights_of_parts == weights, name
            # What is not trained but changes is saved as it was after that step, whole.
            teachers = answer[f"{name} teachers"]
            assert teachers == [(step, {float(step)}) for step in range(1, 11)], name


def test_a_run_goes_on_with_other_numbers_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    straight = run_ranks(resuming.part_of_a_run, 2, "ddp", tmp_path / "straight", 0)[0]
    read: list[int] = []
    lines, words = [], []
    parts: list[tuple[int, Name, int]] = [(2, "ddp", 4), (4, "fsdp", 7), (3, "ddp", 8)]
    for ranks, name, until in (*parts, (1, "single", 0)):
        answers = run_ranks(resuming.part_of_a_run, ranks, name, tmp_path / "run", until)
        read += [index for answer in answers for index in answer[0]]
        lines += answers[0][1]
        words.append(answers[0][2])
    assert [one["step"] for one in lines] == list(range(1, 12))
    wanted = [one["loss"] for one in straight[1]]
    assert [one["loss"] for one in lines] == pytest.approx(wanted, abs=1e-6)
    assert sorted(read[: 3 * SAMPLES]) == sorted([*range(SAMPLES)] * 3)  # three epochs, and 2 steps
    assert len(set(read[3 * SAMPLES :])) == len(read[3 * SAMPLES :]) == 32
    assert [[int(number) for number in re.findall(r"\d+", said)] for said in words[1:]] == [
        [4, 2, 4],  # the step, and the number of ranks then and now
        [7, 4, 3],
        [8, 3, 1],
    ]
    assert words[1:] == snapshot


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    run_ranks(resuming.part_of_a_run, 2, "ddp", tmp_path, 9)  # saved after steps 4, 8 and 9
    (newest,) = (tmp_path / "checkpoints").glob("step-00000009-*")
    file = next(newest.glob("shard-00002-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    _, lines, said = run_ranks(resuming.part_of_a_run, 2, "ddp", tmp_path, 0)[0]
    assert [one["step"] for one in lines] == [9, 10, 11]
    assert file.name in said
    *_, went_on = said.splitlines()
    assert "step 8 " in went_on
    assert went_on == snapshot


OWN = """
import random
from torch import nn, randn, Generator

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

class Noisy(list):
    def __getitem__(self, index):
        sample, label = super().__getitem__(index)
        return sample + random.random(), label

def data():
    inputs = randn(40, 4, generator=Generator().manual_seed(0))
    return Noisy((one, number % 3) for number, one in enumerate(inputs))
"""


def test_a_run_from_settings_goes_on_in_its_folder(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    lines = run_ranks(resuming.from_settings, 2, tmp_path)[0]
    assert [line["step"] for line in lines["whole"]] == [1, 2, 3, 4, 5, 6]
    assert lines["parts"] == lines["whole"]
    kept = sorted(one.name[:13] for one in (tmp_path / "parts" / "checkpoints").iterdir())
    assert kept == ["final", "step-00000004", "step-00000006"]
    final = "checkpoints/final/model.safetensors"
    assert (tmp_path / "parts" / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()
