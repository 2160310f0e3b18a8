"""Every optimizer resumes exactly, and gives on several ranks what it gives on one."""

import math
from pathlib import Path

import pytest

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
    ],
)
def test_a_resumed_training_is_the_one_that_never_stopped(
    run_ranks: RunRanks, tmp_path: Path, name: Name, strategy: Strategy
) -> None:
    for straight, resumed in run_ranks(
        optimizing.straight_and_resumed, 2, tmp_path, name, strategy
    ):
        assert resumed == straight


def test_two_ranks_with_accumulation_are_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone = run_ranks(optimizing.one_training, 1, tmp_path / "one", "adamw", "single", 8)[0]
    two = run_ranks(optimizing.one_training, 2, tmp_path / "two", "adamw", "ddp", 2)
    assert two[0] == two[1]
    errors = [
        abs(mine - theirs)
        for parameter, values in alone.items()
        for mine, theirs in zip(values, two[0][parameter], strict=True)
    ]
    assert max(errors) < 1e-5


# Losses of the evaluations after every second step.
_LOSSES = {2: 1.0, 4: 0.5, 6: 0.7, 8: 0.49, 10: 0.6, 12: math.nan, 14: 0.1, 16: 0.1, 18: 1, 20: 1}


@pytest.mark.nightly
def test_the_best_checkpoint_survives_a_resume(run_ranks: RunRanks, tmp_path: Path) -> None:
    how, best = {"every": 2}, (14, 0.1)
    straight = run_ranks(optimizing.evaluated, 2, tmp_path / "a", _LOSSES, (), how)
    resumed = run_ranks(optimizing.evaluated, 2, tmp_path / "b", _LOSSES, (5, 19), how)
    for answer in (*straight, *resumed):
        assert answer["step"] == 20
        assert answer["best"] == (best[0], {"loss": best[1]})
        # keep=1: the newest, and the best one in addition.
        assert answer["kept"] == [best[0], 20]
        assert answer["weights"] == straight[0]["weights"]
