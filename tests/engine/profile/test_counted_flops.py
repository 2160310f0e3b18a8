"""The FLOPs that the profiler counts in a step of a model that can be counted by hand."""

import pytest
import torch
from torch import nn

from torchmuster.profile.probes.recorder import StepCounter

pytestmark = pytest.mark.engine

# Two products forward, and three backward: the inputs of the first layer need no gradient.
OF_A_SAMPLE = 2 * (32 * 64 + 64 * 8) + 2 * (32 * 64 + 2 * 64 * 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def test_a_whole_step_is_counted_with_the_types_of_its_products() -> None:
    flops, network = StepCounter(), model()
    flops.begin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = network(torch.randn(4, 32)).sum()
    loss.backward()
    flops.end()
    assert (flops.flops, flops.lower_dtype) == (4 * OF_A_SAMPLE, "bfloat16")
    nothing = StepCounter()
    nothing.begin()
    nothing.end()
    assert (nothing.flops, nothing.lower_dtype) == (None, None)
