"""From a model's size to a number of GPUs and a way to split it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from device_strategies import busy, claim, gpu, integrated, node
from torchmuster.devices.for_model import choose_for_model
from torchmuster.devices.model import Node
from torchmuster.devices.request import DeviceRequest
from torchmuster.errors import DevicesBusy, MusterError, TooFewDevices
from torchmuster.units import GiB

EIGHT = node(*(gpu(index) for index in range(8)))


def place(machine: Node, model_gib: float, **asked: Any) -> tuple[list[int], str, str]:
    """Return the GPUs, the strategy and the reason."""
    size = round(model_gib * GiB)
    decision = choose_for_model(machine, size, DeviceRequest(**asked), environment={})
    chosen = [one.index for one in decision.value.devices]
    return chosen, decision.value.strategy, decision.reason


def refusal(machine: Node, model_gib: float, cuda: str | None = None, **asked: Any) -> MusterError:
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    with pytest.raises(MusterError) as caught:
        choose_for_model(
            machine, round(model_gib * GiB), DeviceRequest(**asked), environment=environment
        )
    return caught.value


def test_a_model_that_fits_on_one_gpu(snapshot: SnapshotAssertion) -> None:
    chosen, strategy, reason = place(EIGHT, 14)
    assert (chosen, strategy) == ([0], "single")
    assert "56.0 GiB" in reason
    assert reason == snapshot


def test_with_a_count_each_gpu_gets_a_copy(snapshot: SnapshotAssertion) -> None:
    chosen, strategy, reason = place(EIGHT, 14, count=4)
    assert (chosen, strategy) == ([0, 1, 2, 3], "ddp")
    assert "ddp" in reason
    assert reason == snapshot


def test_a_model_too_large_for_one_is_sharded_over_as_few_as_hold_it(
    snapshot: SnapshotAssertion,
) -> None:
    chosen, strategy, reason = place(EIGHT, 40)
    assert (chosen, strategy) == ([0, 1, 2], "fsdp")
    assert "160 GiB" in reason
    assert "59.3 GiB" in reason
    assert reason == snapshot


def test_what_others_hold_now_is_worth_waiting_for(snapshot: SnapshotAssertion) -> None:
    taken = node(*(busy(gpu(index), "alice") for index in range(2)))
    error = refusal(taken, 14)
    assert isinstance(error, DevicesBusy)
    assert "62.2 GiB" in error.what
    assert error == snapshot


def test_one_free_gpu_too_few_is_made_up_for_by_sharding() -> None:
    """A claimed GPU is not waited for while two free ones together will do."""
    machine = node(*(gpu(index, used_bytes=(30 if index else 0) * GiB) for index in range(3)))
    free = choose_for_model(machine, 14 * GiB, DeviceRequest(share=True), environment={})
    assert free.value.strategy == "single"
    shared = choose_for_model(
        machine, 14 * GiB, DeviceRequest(share=True), environment={}, claims={gpu(0).uuid: claim()}
    )
    assert shared.value.strategy == "fsdp"
    assert [one.index for one in shared.value.devices] == [1, 2]


def test_a_model_too_large_for_the_machine(snapshot: SnapshotAssertion) -> None:
    error = refusal(EIGHT, 200)
    assert isinstance(error, TooFewDevices)
    assert "800 GiB" in error.what
    assert error == snapshot


@pytest.mark.parametrize(
    ("machine", "cuda"),
    [
        (node(), None),
        (EIGHT, ""),
        (node(gpu(0, trouble="GPU is lost")), None),
        (node(integrated()), None),
    ],
    ids=["none", "hidden", "lost", "integrated"],
)
def test_without_gpus_of_a_known_size(
    machine: Node, cuda: str | None, snapshot: SnapshotAssertion
) -> None:
    error = refusal(machine, 1, cuda=cuda)
    assert isinstance(error, TooFewDevices)
    assert error == snapshot


def test_the_model_is_placed_on_the_gpus_that_are_named() -> None:
    assert place(EIGHT, 40, ids=(5, 6, 7))[:2] == ([5, 6, 7], "fsdp")
    assert place(EIGHT, 14, ids=(5, 6, 7))[:2] == ([5], "single")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 80), min_size=1, max_size=8))
def test_the_chosen_gpus_hold_the_model_and_fewer_would_not(gib: int, used: list[int]) -> None:
    machine = node(*(gpu(index, used_bytes=one * GiB) for index, one in enumerate(used)))
    free = sorted(((80 - one) * GiB for one in used), reverse=True)
    needed = gib * GiB * 4 / 0.9
    enough = [count for count in range(1, len(free) + 1) if free[count - 1] * count >= needed]
    try:
        decision = choose_for_model(machine, gib * GiB, DeviceRequest(share=True), environment={})
    except MusterError:
        assert not enough
        return
    assert len(decision.value.devices) == enough[0]
    each = needed / enough[0]
    assert all((one.free_bytes or 0) >= each for one in decision.value.devices)
    assert decision.value.strategy == ("single" if enough[0] == 1 else "fsdp")
