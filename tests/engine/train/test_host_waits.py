"""A step makes the host wait for the device in no hidden way."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from made_up_worlds import made_up_world
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.step_log import CommunicationTime
from torchmuster.train.world import World

pytestmark = pytest.mark.engine


def world_on(device: str, ranks: int = 1) -> World:
    return World(**{**vars(made_up_world(ranks=ranks)), "device": torch.device(device)})


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


def test_batches_that_no_worker_has_pinned_are_pinned(pinned: list[torch.Tensor]) -> None:
    batch = {"x": torch.ones(2), "already there": torch.ones(2, device="meta"), "name": "a"}
    move_to_device(batch, torch.device("meta"))
    assert pinned == []
    move_to_device(batch, torch.device("meta"), pin=True)
    assert [one.device.type for one in pinned] == ["cpu"]
    pinned.clear()
    loader = BatchLoader(list(range(4)), world_on("meta"), global_batch_size=4)
    loader._pins_memory = True
    batches = [micro.batch for step in loader.epoch(0) for micro in step.micro_batches]
    assert [one.device.type for one in batches] == ["meta"]
    assert len(pinned) == 1


@pytest.mark.parametrize(("device", "every"), [("cpu", 10), ("cuda:3", 100)])
def test_ddp_measures_seldom_on_a_gpu_where_a_measured_step_waits(
    monkeypatch: pytest.MonkeyPatch, device: str, every: int
) -> None:
    asked: list[int] = []
    said = {"avg_backward_comm_time": 5e9, "avg_backward_compute_comm_overlap_time": 3e9}
    name = "_set_ddp_runtime_logging_sample_rate"
    monkeypatch.setattr(DistributedDataParallel, name, lambda model, rate: asked.append(rate))
    monkeypatch.setattr(DistributedDataParallel, "_get_ddp_logging_data", lambda model: said)
    model: Any = object.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    meter: Any = CommunicationTime(model, world_on(device, ranks=2))
    assert asked == [every]
    # DDP measures its first 10 iterations, and later those that its rate divides.
    for iteration, measured in ((10, 10), (every * 6, 10 + 6 - 10 // every)):
        said["iteration"] = iteration
        meter._mean_s = None
        assert meter.exposed_s(1) == pytest.approx(2.0)
        assert meter._measured == measured
