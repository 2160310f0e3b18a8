"""Learning-rate curves, and what cannot be one."""

import json

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.optimizers import Shape, schedule, schedule_factor

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_the_curves(shape: Shape, expected: list[float]) -> None:
    given = [schedule_factor(step, shape, warmup_steps=2, total_steps=6) for step in range(7)]
    assert given == pytest.approx(expected, abs=1e-6)
    assert schedule_factor(100, shape, warmup_steps=2, total_steps=6) == pytest.approx(expected[-1])


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


def test_what_cannot_be_a_curve_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="'cosine'") as refusal:
        schedule(_optimizer(), "cosine", warmup_steps=3)
    assert refusal.value == snapshot
    assert schedule(_optimizer(), "constant", warmup_steps=4).get_last_lr() == [0.5]
    with pytest.raises(Impossible, match="9 steps") as refused:
        schedule(_optimizer(), "linear", warmup_steps=9, total_steps=8)
    assert refused.value == snapshot
    with pytest.raises(Impossible, match="'square'") as refused:
        schedule(_optimizer(), "square")  # type: ignore[arg-type]
    assert refused.value == snapshot
