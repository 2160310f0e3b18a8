"""Training's parts on a GPU: which device they name, and what they wait for, in which order."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from fake_accelerator import FakeAccelerator
from fake_gpu_tensors import FakeGpu
from made_up_worlds import made_up_world
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.out_of_memory import memory_table
from torchmuster.train.precision import supported_by
from torchmuster.train.reports import Reports
from torchmuster.train.seeds import load_random_states, save_random_states
from torchmuster.train.step import HostCopy
from torchmuster.train.step_log import StepLog
from torchmuster.units import GiB

pytestmark = pytest.mark.engine

GPU = torch.device("cuda", 3)
WORLD = replace(made_up_world(), device=GPU, backend="nccl")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator().install(monkeypatch)


def names(accelerator: FakeAccelerator) -> list[str]:
    return [call.name for call in accelerator.calls]


def test_numbers_are_copied_to_pinned_memory_and_read_after_their_event(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGpu(accelerator, monkeypatch):
        copied = HostCopy(torch.tensor([1.0, 0.0, 2.5]).to(GPU))
        before = names(accelerator)
        assert copied.read() == [1.0, 0.0, 2.5]
    assert accelerator.pinned == [12]
    assert before.index("copy_") < before.index("Event.record")
    assert "Event.synchronize" not in before
    assert names(accelerator)[-1] == "Event.synchronize"
    assert [call.argument for call in accelerator.calls if call.name == "Event"] == [GPU]


def test_the_random_state_is_that_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {index: torch.full((16,), index, dtype=torch.uint8) for index in range(8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state})
    )
    kept = save_random_states(WORLD)
    drawn = random.random(), torch.rand(1).item()
    states[3] = torch.zeros(16, dtype=torch.uint8)
    load_random_states(kept, WORLD)
    assert (random.random(), torch.rand(1).item()) == drawn
    assert {index: int(state[0]) for index, state in states.items()} == {one: one for one in states}
    states[3] = torch.zeros(16, dtype=torch.uint8)
    load_random_states(kept, made_up_world())  # a run that goes on without a GPU
    assert int(states[3][0]) == 0


@pytest.mark.parametrize("bf16", [True, False])
def test_intels_gpus_are_asked_for_bf16(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: bf16)
    assert supported_by(torch.device("xpu", 1)) == ("bf16" if bf16 else "fp16")


def test_the_memory_table_has_the_devices_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator(allocated_bytes=5 * GiB, reserved_bytes=7 * GiB)
    accelerator.install(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 6 * GiB)
    table = memory_table(list(nn.Linear(2, 2).parameters()), None, GPU)
    assert (table["in use"], table["peak"], table["limit"]) == (5 * GiB, 6 * GiB, 80 * GiB)
    assert table["activations and others"] == 5 * GiB - table["parameters"]
    of_apple = memory_table([], None, torch.device("mps"))  # its memory is the host's
    assert of_apple["in use"] > 0


def test_a_record_waits_for_the_device_and_has_its_peak(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {0: 1, 3: 9 * GiB}
    monkeypatch.setattr(
        torch.accelerator, "max_memory_allocated", lambda device: peaks[torch.device(device).index]
    )
    log = StepLog(WORLD, Reports(WORLD, quiet=True))
    log.add(MicroBatch(batch=None, samples=4), torch.tensor(2.0), None)
    log.end_step(torch.tensor(0.0), epoch=0, learning_rate=0.1, norm=None)
    with FakeGpu(accelerator, monkeypatch):
        log.finish(1)
    record = log.last_record
    assert record is not None
    assert [call.argument for call in accelerator.calls if call.name == "synchronize"] == [GPU]
    assert (record.loss, record.memory_peak_bytes) == (2.0, 9 * GiB)


def test_batches_arrive_on_the_ranks_gpu(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = BatchLoader(
        [torch.tensor([float(one)]) for one in range(4)],
        WORLD,
        global_batch_size=4,
        shuffle=False,
    )
    with FakeGpu(accelerator, monkeypatch):
        (micro,) = next(loader.epoch(0))
        assert micro.batch.device == GPU
        assert micro.batch.cpu().flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_streams_batches_arrive_on_the_ranks_gpu(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = StreamLoader([0.0, 1.0, 2.0, 3.0], WORLD, global_batch_size=4)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8)
    )
    with FakeGpu(accelerator, monkeypatch):
        (micro,) = next(loader.epoch(0))
        assert micro.batch.device == GPU
        assert micro.batch.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
