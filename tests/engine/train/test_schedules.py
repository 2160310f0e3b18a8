"""Learning-rate curves, and what cannot be one."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from torchmuster.errors import Impossible
from torchmuster.train.optimizers import Shape, schedule

pytest.importorskip("transformers")
from transformers import get_scheduler

pytestmark = [pytest.mark.engine, pytest.mark.integrations]


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize(
    ("shape", "options", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("warmup_stable_decay", {"decay_steps": 8}, {"num_decay_steps": 8}),
        (
            "warmup_stable_decay",
            {"decay_steps": 8, "min_learning_rate": 0.2},
            {"num_decay_steps": 8, "min_lr_ratio": 0.1},
        ),
    ],
)
def test_every_step_has_the_rate_of_transformers(
    shape: Shape, options: dict[str, Any], theirs: dict[str, Any], warmup_steps: int
) -> None:
    total = 25

    def rates(curve: LRScheduler) -> list[float]:
        given = []
        for _ in range(total):
            given.append(float(curve.get_last_lr()[0]))
            curve.optimizer.step()
            curve.step()
        return given

    expected = rates(
        get_scheduler(
            shape,
            _optimizer(),
            num_warmup_steps=warmup_steps,
            num_training_steps=total,
            scheduler_specific_kwargs=theirs,
        )
    )
    usual = rates(
        schedule(_optimizer(), shape, warmup_steps=warmup_steps, total_steps=total, **options)
    )
    # The warm-up has transformers' rates one step earlier, and no step has the rate 0.
    assert usual[warmup_steps:] == pytest.approx(expected[warmup_steps:], rel=1e-12, abs=1e-15)
    assert usual[:warmup_steps] == pytest.approx(expected[1 : warmup_steps + 1], rel=1e-12)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)


def test_a_curve_goes_on_from_its_state_which_is_json() -> None:
    optimizer, again = _optimizer(), _optimizer()
    curve = schedule(optimizer, "linear", total_steps=4)
    for _ in range(3):
        optimizer.step()
        curve.step()
    resumed = schedule(again, "linear", total_steps=4)
    resumed.load_state_dict(json.loads(json.dumps(curve.state_dict())))
    again.step()
    resumed.step()
    assert resumed.get_last_lr() == [0.0]
    assert curve.get_last_lr() == [0.5]


def test_what_cannot_be_a_curve_is_refused() -> None:
    with pytest.raises(Impossible, match="'cosine'"):
        schedule(_optimizer(), "cosine", warmup_steps=3)
    assert schedule(_optimizer(), "constant", warmup_steps=4).get_last_lr() == [0.5]
    with pytest.raises(Impossible, match="9 steps"):
        schedule(_optimizer(), "linear", warmup_steps=9, total_steps=8)
