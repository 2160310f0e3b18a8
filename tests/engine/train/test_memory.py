"""The memory table, and what is said when memory runs out."""

import platform
import sys

import pytest
import torch
from torch import nn

from torchmuster.errors import OutOfMemory
from torchmuster.train.out_of_memory import fixes, is_out_of_memory, memory_table, oom_report
from torchmuster.train.world import World
from torchmuster.units import GiB, MiB

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
HUGE = 2**60


def world(size: int = 1) -> World:
    return World(
        global_rank=0,
        local_rank=0,
        node_rank=0,
        world_size=size,
        local_world_size=size,
        device=CPU,
        backend="gloo",
    )


def test_the_table_counts_what_a_step_leaves() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    tied = nn.Linear(100, 100, bias=False)
    tied.weight = model[0].weight  # type: ignore[assignment]
    model.append(tied)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    found = memory_table(list(model.parameters()), optimizer, CPU)
    parameters = 4 * (100 * 100 + 100 + 100 + 100)
    assert found["parameters"] == parameters
    assert found["gradients"] == parameters
    assert found["optimizer states"] == 2 * parameters + 4 * 4  # and a step count for each
    assert 20 * MiB < found["in use"] <= found["peak"] + MiB
    assert found["in use"] < found["limit"]


def test_the_peak_on_macos_is_in_bytes_already(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = memory_table([], None, CPU)["peak"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_table([], None, CPU)["peak"] < elsewhere / 500


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator:"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory is only in my text"), False),
    ],
)
def test_errors_of_memory_are_recognized(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_the_error_names_the_rank_and_has_its_table() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oom_report(world(), model, optimizer, micro_batch_size=8)
    def step() -> None:
        model(torch.ones(2, 1)).sum().backward()
        torch.empty(HUGE, dtype=torch.uint8)

    with pytest.raises(OutOfMemory) as caught:
        step()
    assert caught.value.what == f"rank 0 on {platform.node()} (cpu) ran out of memory"
    first, *rows = caught.value.why.splitlines()
    assert "1152921504606846976 bytes" in first
    assert rows[0] == "parameters                        4 B"
    assert "in use" in caught.value.why
    assert "micro_batch_size: 4 instead of 8" in caught.value.fix
    assert is_out_of_memory(caught.value.__cause__)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters_bytes", "first"),
    [(GiB, "distributed.strategy"), (GiB // 8, "train.micro_batch_size")],
)
def test_what_takes_most_is_changed_first(parameters_bytes: int, first: str) -> None:
    table = dict.fromkeys(("parameters", "gradients", "optimizer states"), parameters_bytes)
    table["activations and others"] = GiB
    lines = fixes(table, world(4), 8, [])
    assert first in lines[0]
    assert len(lines) == 4
