"""Trainer on real ranks: what its lines say is true, whatever the ranks and the strategy."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rank_group import RunRanks
from rank_programs import training

pytestmark = pytest.mark.ranks


def expected_losses(losses: list[tuple[float, int]], steps: list[int]) -> list[float]:
    """Return the mean loss between two lines, from each step's total and count."""
    means = []
    for begin, end in pairwise([0, *steps]):
        part = losses[begin:end]
        means.append(sum(total for total, _ in part) / sum(count for _, count in part))
    return means


def test_losses_of_the_lines_are_those_of_one_plain_process(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (by_hand,) = run_ranks(training.train_by_hand, 1)
    for ranks in (1, 2, 3):
        answers = run_ranks(training.train_in_many_ways, ranks, tmp_path)
        assert all(not records for answer in answers[1:] for records in answer.values())
        for name, records in answers[0].items():
            steps = [one["step"] for one in records]
            assert steps == [1, 2, 4, 6], name  # 3 steps an epoch, a line every 2
            wanted = expected_losses(by_hand[name.split()[1]], steps)
            assert [one["loss"] for one in records] == pytest.approx(wanted, abs=1e-6), name
            assert [one["epoch"] for one in records] == [0, 0, 1, 1]
            assert [one["samples"] for one in records] == [8, 8, 6 + 8, 8 + 6]
            assert all((one["tokens_per_s"] is None) is ("mean" in name) for one in records)
            file = tmp_path / f"{name.replace(' ', '-')}-{ranks}" / "metrics" / "steps.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            written_s = [line.pop("at_unix_s") for line in lines]
            assert written_s == sorted(written_s)
            assert lines == records
            shares = ("data", "compute", "communication", "checkpoint", "evaluation")
            for one in records:
                parts = [one[f"{share}_share"] or 0.0 for share in shares]
                assert sum(parts) == pytest.approx(1.0)
                assert all(0 <= part <= 1 for part in parts)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_new_trainer_goes_on_from_the_state_of_another(run_ranks: RunRanks, name: str) -> None:
    went_on, began_anew = run_ranks(training.go_on_elsewhere, 2, name)[0]
    assert went_on[-1]["step"] == began_anew[-1]["step"] == 10
    assert went_on[-1]["epoch"] == began_anew[-1]["epoch"]
    assert went_on[-1]["loss"] == began_anew[-1]["loss"]


def test_a_bad_step_is_left_out_of_the_loss_and_explained(run_ranks: RunRanks) -> None:
    said, records, steps = run_ranks(training.with_a_bad_sample, 2)[0]
    assert steps == 4
    (finding,) = [one for one in said if "input batch" in one]
    assert "step 2 of epoch 0: rank 1's input batch has NaN" in finding
    assert "all ranks skipped this step" in finding
    assert [one["skipped_steps"] for one in records] == [0, 1]
    assert all(one["loss"] == one["loss"] for one in records)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_weights_are_written_whole_under_the_models_own_names(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    answers = run_ranks(training.save, 2, tmp_path)
    model: Any = training.tagger().state_dict()
    del model["head.weight"]  # tied to the embedding
    for name in ("ddp", "fsdp"):
        for limit in (10**9, 300):
            folder = tmp_path / f"{name}-{limit}"
            written = whole(folder)
            assert written.keys() == model.keys()
            assert all(torch.equal(written[one], model[one]) for one in model)
        assert [one.name for one in (tmp_path / f"{name}-{10**9}").iterdir()] == [
            "model.safetensors"
        ]
        index = json.loads((tmp_path / f"{name}-300" / "model.safetensors.index.json").read_text())
        sizes = sum(one.numel() * 4 for one in model.values())
        assert index["metadata"] == {"total_size": sizes}
        for tensor, file in index["weight_map"].items():
            with safe_open(tmp_path / f"{name}-300" / file, "pt") as opened:
                assert tensor in opened.keys()  # noqa: SIM118  # it is no dictionary
                assert opened.metadata() == {"format": "pt"}
        for answer in answers:
            first, why, fix = answer[name].splitlines()
            assert first == f"cannot write the weights to {tmp_path / 'file' / 'below'}"
            assert "exists" in why.lower() or "directory" in why.lower()
            assert fix == "free disk space there, or write them to another folder"
    assert not list(tmp_path.glob(".*"))


def test_an_optimizer_made_before_trains_the_sharded_parameters(run_ranks: RunRanks) -> None:
    whole = run_ranks(training.with_an_optimizer, 2, "ddp")
    sharded = run_ranks(training.with_an_optimizer, 2, "fsdp")
    assert sharded[0] == pytest.approx(whole[0], rel=1e-5)
