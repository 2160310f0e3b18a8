"""What is said of a model's number types, which decide what becomes of small updates."""

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from torchmuster.decision import Decision
from torchmuster.train.models.factory import lost_updates, with_weights_of
from torchmuster.train.precision import BF16, FP32

pytestmark = pytest.mark.engine


def test_trained_weights_of_16_bits_are_told(snapshot: SnapshotAssertion) -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    assert "model.torch_dtype: float32" in lost_updates(model)
    assert lost_updates(model) == snapshot
    model[0].requires_grad_(False)
    assert lost_updates(model) == ""


def test_the_reason_for_fp32_tells_what_is_computed_in_fewer_bits(
    snapshot: SnapshotAssertion,
) -> None:
    model = nn.Linear(2, 2, dtype=torch.float16)
    fp32 = Decision(value=FP32, reason="fp32: it was asked for")
    assert with_weights_of(model, fp32).value is FP32
    assert with_weights_of(model, fp32).reason == snapshot
    assert with_weights_of(nn.Linear(2, 2), fp32) is fp32
    bf16 = Decision(value=BF16, reason="bf16: it was asked for")
    assert with_weights_of(model, bf16) is bf16
