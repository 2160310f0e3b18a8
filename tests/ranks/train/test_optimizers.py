"""Every optimizer resumes exactly, and gives on several ranks what it gives on one."""

import math
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import optimizing
from torchmuster.train.optimizers import Name
from torchmuster.train.strategies.choose import Name as Strategy

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("adamw", "ddp"),
        ("sgd", "fsdp"),
        ("adafactor", "ddp"),
        ("muon", "ddp"),
        pytest.param("muon", "fsdp", marks=pytest.mark.nightly),
        pytest.param("adamw_8bit", "ddp", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_training_is_the_one_that_never_stopped(
    run_ranks: RunRanks, tmp_path: Path, name: Name, strategy: Strategy
) -> None:
    for straight, resumed in run_ranks(
        optimizing.straight_and_resumed, 2, tmp_path, name, strategy
    ):
        assert resumed == straight


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adafactor", "muon", "adamw_8bit"])
def test_it_resumes_in_one_process(run_ranks: RunRanks, tmp_path: Path, name: Name) -> None:
    [(straight, resumed)] = run_ranks(optimizing.straight_and_resumed, 1, tmp_path, name, "single")
    assert resumed == straight


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("adamw", 1e-5),
        ("adafactor", 1e-5),
        ("muon", 1e-2),  # torch orthogonalizes in bfloat16, which makes small differences larger
        ("adamw_8bit", 1e-3),  # the next of 256 values
    ],
)
def test_two_ranks_with_accumulation_are_one_process(
    run_ranks: RunRanks, tmp_path: Path, name: Name, error: float
) -> None:
    alone = run_ranks(optimizing.one_training, 1, tmp_path / "one", name, "single", 8)[0]
    two = run_ranks(optimizing.one_training, 2, tmp_path / "two", name, "ddp", 2)
    assert two[0] == two[1]
    errors = [
        abs(mine - theirs)
        for parameter, values in alone.items()
        for mine, theirs in zip(values, two[0][parameter], strict=True)
    ]
    assert max(errors) < error
    assert math.sqrt(sum(one**2 for one in errors) / len(errors)) < error / 10


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
def test_an_optimizer_that_cannot_update_shards_is_refused(
    run_ranks: RunRanks, tmp_path: Path, name: Name, snapshot: SnapshotAssertion
) -> None:
    for said in run_ranks(optimizing.refusal, 2, tmp_path, name):
        assert said == snapshot(name=name)


# Losses of the evaluations after every second step.
_LOSSES = {2: 1.0, 4: 0.5, 6: 0.7, 8: 0.49, 10: 0.6, 12: math.nan, 14: 0.1, 16: 0.1, 18: 1, 20: 1}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "best", "last"),
    [
        ({"every": 2, "patience": 2}, (8, 0.49), 12),
        ({"every": 2}, (14, 0.1), 20),
        ({"every": 2, "patience": 2, "best_mode": "max"}, (2, 1.0), 6),
    ],
)
def test_early_stopping_and_the_best_checkpoint_survive_a_resume(
    run_ranks: RunRanks,
    tmp_path: Path,
    how: dict[str, Any],
    best: tuple[int, float],
    last: int,
) -> None:
    straight = run_ranks(optimizing.stopped_early, 2, tmp_path / "a", _LOSSES, (), how)
    resumed = run_ranks(optimizing.stopped_early, 2, tmp_path / "b", _LOSSES, (5, last - 1), how)
    for answer in (*straight, *resumed):
        assert answer["step"] == last
        assert answer["stopped"] is ("patience" in how)
        assert bool(answer["said"]) is ("patience" in how)
        assert answer["best"] == (best[0], {"loss": best[1]})
        # keep=1: the newest, and the best one in addition.
        assert answer["kept"] == [best[0], last]
        assert answer["weights"] == straight[0]["weights"]


@pytest.mark.nightly
def test_early_stopping_after_epochs(run_ranks: RunRanks, tmp_path: Path) -> None:
    losses = {3: 1.0, 6: 0.5, 9: 0.7, 12: 0.8}  # an epoch has 3 steps
    for stops in ((), (7,)):
        for answer in run_ranks(
            optimizing.stopped_early, 2, tmp_path / str(len(stops)), losses, stops, {"patience": 2}
        ):
            assert (answer["step"], answer["stopped"]) == (12, True)
            assert answer["best"] == (6, {"loss": 0.5})
            assert answer["kept"] == [6, 12]
