"""Counted flops: what they are of a model that can be counted by hand, and the share of a device's rate."""

import pytest
import torch
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.train.counted_flops import CountedFlops, FlopsPerSample, is_compiled
from torchmuster.train.metrics.communication import communication_of
from torchmuster.train.metrics.step_metrics import StepMetrics
from torchmuster.worker.reporting import peak_flops

pytestmark = pytest.mark.engine

WORLD = made_up_world()
# Two products forward, and three backward: the inputs of the first layer need no gradient.
OF_A_SAMPLE = 2 * (32 * 64 + 64 * 8) + 2 * (32 * 64 + 2 * 64 * 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def compute(network: nn.Module, samples: int) -> None:
    network(torch.randn(samples, 32)).sum().backward()


def test_a_resumed_run_uses_the_count_of_the_run_before_and_counts_nothing() -> None:
    network = model()
    before, after, new = FlopsPerSample(network), FlopsPerSample(network), FlopsPerSample(network)
    new.restore(before.state())
    assert new.state() == []  # nothing was counted yet
    with before.counting(4):
        compute(network, 4)
    after.restore(before.state())
    with after.counting(2):
        compute(network, 4)
    assert after.value == before.value == OF_A_SAMPLE


def test_the_first_micro_batch_with_samples_is_counted_and_no_other() -> None:
    network = model()
    flops = FlopsPerSample(network)
    with flops.counting(0):
        compute(network, 1)
    assert flops.value is None
    for samples in (4, 7):
        with flops.counting(samples):
            compute(network, 4)
        assert flops.value == OF_A_SAMPLE


def test_counting_changes_no_gradient() -> None:
    torch.manual_seed(0)
    network, samples = model(), torch.randn(4, 32)

    def gradients() -> list[torch.Tensor]:
        network.zero_grad()
        network(samples).sum().backward()
        return [one.grad.clone() for one in network.parameters() if one.grad is not None]

    with FlopsPerSample(network).counting(4):
        counted = gradients()
    for one, other in zip(counted, gradients(), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_model_is_not_counted() -> None:
    network = model()
    network[0].compile(backend="eager")
    assert is_compiled(network)
    whole = torch.compile(model(), backend="eager")
    assert isinstance(whole, nn.Module)
    assert is_compiled(whole)
    assert not is_compiled(model())
    flops = FlopsPerSample(network)
    with flops.counting(4):
        pass
    assert flops.value is None


def test_a_whole_step_is_counted_with_the_types_of_its_products() -> None:
    flops, network = CountedFlops(), model()
    flops.begin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = network(torch.randn(4, 32)).sum()
    loss.backward()
    flops.end()
    assert (flops.flops, flops.lower_type) == (4 * OF_A_SAMPLE, "bfloat16")
    nothing = CountedFlops()
    nothing.begin()
    nothing.end()
    assert (nothing.flops, nothing.lower_type) == (None, None)


@pytest.mark.parametrize(("peak", "known"), [(1e30, True), (None, False)])
def test_a_record_has_the_rate_and_its_share_where_the_highest_is_known(
    peak: float | None, known: bool
) -> None:
    tally = StepMetrics(WORLD, communication_of(nn.Linear(1, 1), WORLD), peak_flop_s=peak)
    tally.flops_per_sample = 1e6
    tally.add(torch.tensor(0.1), 4, None)
    tally.end_step(torch.tensor(0.0))
    record = tally.record(step=1, epoch=0, learning_rate=0.1, norm=None).finish()
    assert record.flop_s is not None
    assert record.flop_s == pytest.approx(1e6 * record.samples_per_s)
    assert (record.mfu is not None) is known
    if record.mfu is not None:
        assert record.mfu == pytest.approx(record.flop_s / 1e30)


def test_of_a_processor_nobody_has_said_the_highest_rate() -> None:
    assert peak_flops(torch.device("cpu"), model(), torch.float32) is None


@pytest.mark.parametrize(
    ("name", "compute_in", "weights", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, torch.float32, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, torch.bfloat16, None),
        ("NVIDIA Something New", torch.bfloat16, torch.float32, None),
    ],
)
def test_the_highest_rate_is_that_of_the_card_and_the_type(
    name: str,
    compute_in: torch.dtype,
    weights: torch.dtype,
    peak: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda:0"), model().to(weights), compute_in) == peak
