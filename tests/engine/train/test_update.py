"""One optimizer step in one process: what it gives, and what it says when it is used wrongly."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.loss_scale import LossScale
from torchmuster.train.precision import FP16
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.single import Single

pytestmark = pytest.mark.engine

WORLD = made_up_world()


def step_of(sizes: list[int], *, rounds: int | None = None, samples: int | None = None) -> Step:
    inputs = torch.split(torch.arange(float(sum(sizes))), sizes)
    return Step(
        epoch=1,
        number=5,
        rounds=len(sizes) if rounds is None else rounds,
        samples=samples,
        nominal_samples=4,
        micro_batches=[
            MicroBatch(batch=one[:, None], samples=len(one)) for one in inputs if len(one)
        ],
    )


def update_of(model: nn.Module, **options: Any) -> TrainStep:
    return TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=1.0), Single(WORLD), WORLD, **options
    )


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize("sizes", [[3, 1], [2, 1]])  # of 4 samples, and at the end of an epoch
def test_means_of_unequal_micro_batches_are_weighed_by_their_samples(
    model: nn.Linear, sizes: list[int]
) -> None:
    before = model.weight.item()
    update = update_of(model)
    for micro in update.accumulate(step_of(sizes, samples=sum(sizes))):
        update.backward(model(micro.batch).mean())
    outcome = update.apply()
    assert outcome.applied
    assert before - model.weight.item() == pytest.approx(sum(range(sum(sizes))) / sum(sizes))


def test_a_callers_count_keeps_its_value_and_nothing_counted_changes_nothing(
    model: nn.Linear,
) -> None:
    update = update_of(model)
    before = model.weight.item()
    count = torch.tensor(0)
    for micro in update.accumulate(step_of([2, 1], samples=None)):
        update.backward(model(micro.batch).sum() * 0, count)
    update.apply()
    assert count.item() == 0
    assert model.weight.item() == before


def test_clipping_gives_the_norm_from_before_and_the_length_asked_for(model: nn.Linear) -> None:
    before = model.weight.item()
    update = update_of(model, clip_norm=0.5)
    for micro in update.accumulate(step_of([4], samples=4)):
        update.backward(model(micro.batch).mean())
    norm = update.apply().norm
    assert norm is not None
    assert float(norm) == pytest.approx(1.5)
    assert before - model.weight.item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
def test_whatever_the_dtypes_of_gradients_only_numbers_are_applied(
    dtype: torch.dtype, bad: float
) -> None:
    both = nn.ParameterList([torch.zeros(2), torch.zeros(2, dtype=dtype)])
    both.append(torch.zeros(0, dtype=dtype))  # as a shard may be
    for at_fault, factor in enumerate([bad, 1.0]):
        update = update_of(both)
        for _ in update.accumulate(step_of([1], samples=1)):
            loss = both[0].sum() + both[1].real.sum() + both[2].real.sum()
            update.backward(loss + both[1].real[0] * (factor - 1))
        assert update.apply().applied == (at_fault == 1 or bad == 3e38)


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_bad_number_in_a_sparse_gradient_is_found(factor: float) -> None:
    table = nn.Embedding(3, 1, sparse=True)
    update = update_of(table)
    for _ in update.accumulate(step_of([1], samples=1)):
        update.backward(table(torch.tensor([0, 0])).sum() * factor)
    assert update.apply().applied == (factor == 1.0)


def test_a_loss_scale_can_be_kept_as_json_and_gone_on_from(model: nn.Linear) -> None:
    first = update_of(model, precision=FP16, scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    for micro in first.accumulate(step_of([4], samples=4)):
        first.backward(model(micro.batch).mean() * float("inf"))
    outcome = first.apply()
    assert not outcome.applied
    assert outcome.overflowed
    kept = json.loads(json.dumps(first.state()))
    assert kept["loss_scale"]["skipped"] == 1
    second = update_of(model, precision=FP16)
    second.restore(kept)
    assert second.state() == kept
    assert kept["loss_scale"]["scaler"]["scale"] == 32.0
    in_fp32 = update_of(model)
    in_fp32.restore(kept)
    assert in_fp32.state() == {"loss_scale": None}


def test_fp16_that_does_not_suffice_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    scale = LossScale(WORLD)
    for _ in range(2):
        scale.count(1.0, applied=False)
    for number in range(2, 106):
        scale.count(64.0, applied=number % 10 != 0)
    below, many = (record.message for record in caplog.records)
    assert "the loss scale has fallen below 1" in below
    assert "more than 5% of the steps were skipped" in many


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_is_refused_where_trained_weights_have_half_the_bits(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1).to(dtype)
    with pytest.raises(Impossible) as raised:
        update_of(model, precision=FP16)
    assert (
        raised.value.what
        == f"precision fp16 was requested, but the trainable weights are {str(dtype)[6:]}"
    )
    assert raised.value.why == (
        "the loss scale needs gradients in fp32: they cannot be unscaled in 16 bits"
    )
    assert raised.value.fix == (
        "keep the weights in fp32 (model.torch_dtype: float32), or use precision bf16 or fp32"
    )
    model.requires_grad_(False)
    update_of(nn.Sequential(model, nn.Linear(1, 1)), precision=FP16)  # as LoRA has it


def test_backward_and_apply_belong_to_a_step(model: nn.Linear) -> None:
    update = update_of(model)
    with pytest.raises(RuntimeError, match="no micro-batch expects a loss"):
        update.backward(model(torch.ones(1, 1)).mean())
    with pytest.raises(RuntimeError, match="without a step"):
        update.apply()
    for micro in update.accumulate(step_of([2], samples=2)):
        update.backward(model(micro.batch).mean())
        with pytest.raises(RuntimeError, match="no micro-batch expects a loss"):
            update.backward(model(micro.batch).mean())
    with pytest.raises(RuntimeError, match="before the previous one was applied"):
        list(update.accumulate(step_of([2], samples=2)))
    assert update.apply().applied
    with pytest.raises(RuntimeError, match="0 of 1 micro-batches"):
        list(update.accumulate(step_of([2], samples=2)))


@pytest.mark.parametrize("rounds", [1, 3])
def test_another_number_of_micro_batches_is_refused(model: nn.Linear, rounds: int) -> None:
    update = update_of(model)

    def train() -> None:
        for micro in update.accumulate(step_of([2, 2], rounds=rounds, samples=4)):
            update.backward(model(micro.batch).mean())

    with pytest.raises(RuntimeError, match=f"of {rounds} micro-batches"):
        train()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda loss: loss.item(), "the loss is a float"),
        (lambda loss: loss.detach(), "requires_grad=False"),
        (lambda loss: loss.repeat(2), "shape (2,)"),
    ],
)
def test_a_loss_without_a_backward_is_refused(
    model: nn.Module, spoil: Callable[[torch.Tensor], Any], words: str
) -> None:
    update = update_of(model)
    first = next(update.accumulate(step_of([3], samples=3)))
    with pytest.raises(MusterError) as refusal:
        update.backward(spoil(model(first.batch).mean()))
    assert words in refusal.value.what
