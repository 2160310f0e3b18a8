"""The memory table, and what is said when memory runs out."""

import platform
import re

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from torchmuster.errors import OutOfMemory
from torchmuster.train.out_of_memory import (
    MemoryTable,
    is_out_of_memory,
    memory_table,
    oom_report,
    out_of_memory_error,
)
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


def table(**values: int | None) -> MemoryTable:
    settings: dict[str, int | None] = {
        "parameters_bytes": 4 * GiB,
        "gradients_bytes": 4 * GiB,
        "optimizer_bytes": 8 * GiB,
        "buffers_bytes": 0,
        "used_bytes": 20 * GiB,
        "peak_bytes": 22 * GiB,
        "reserved_bytes": 23 * GiB,
        "limit_bytes": 24 * GiB,
        **values,
    }
    return MemoryTable(device=torch.device("cuda", 1), **settings)  # type: ignore[arg-type]


def test_the_table_counts_what_a_step_leaves() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    tied = nn.Linear(100, 100, bias=False)
    tied.weight = model[0].weight  # type: ignore[assignment]
    model.append(tied)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    found = memory_table(model, optimizer, CPU)
    parameters = 4 * (100 * 100 + 100 + 100 + 100)
    assert found.parameters_bytes == parameters
    assert found.gradients_bytes == parameters
    assert found.optimizer_bytes == 2 * parameters + 4 * 4  # and a step count for each
    assert found.buffers_bytes == 4 * 200 + 8
    assert found.used_bytes is not None
    assert found.peak_bytes is not None
    assert found.limit_bytes is not None
    assert 20 * MiB < found.used_bytes <= found.peak_bytes + MiB
    assert found.used_bytes < found.limit_bytes


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


class Asks(nn.Module):
    """Asks for far too much in a phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.phase == "forward":
            torch.empty(HUGE, dtype=torch.uint8)
        result = x * self.weight
        if self.phase == "backward":
            result.register_hook(lambda gradient: torch.empty(HUGE, dtype=torch.uint8))  # type: ignore[no-untyped-call]
        return result


class AsksInStep(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        torch.empty(HUGE, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "in the forward pass"),
        ("backward", "in the backward pass"),
        ("step", "in the optimizer step"),
        ("none", "outside of the model"),
    ],
)
def test_who_what_and_how_much_is_said(phase: str, words: str) -> None:
    model = Asks(phase)
    kind = AsksInStep if phase == "step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    @oom_report(world(), model, optimizer)
    def step() -> None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.empty(HUGE, dtype=torch.uint8)

    with pytest.raises(OutOfMemory) as caught:
        step()
    assert caught.value.what == (
        f"rank 0 on {platform.node()} (cpu) ran out of memory {words}, requested 1048576 TiB"
    )
    assert caught.value.why.splitlines()[0] == "parameters                        4 B"
    assert "in use by this process" in caught.value.why
    assert is_out_of_memory(caught.value.__cause__)  # type: ignore[arg-type]


def test_what_to_change_begins_with_what_takes_most(snapshot: SnapshotAssertion) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has …")
    told = out_of_memory_error(error, table(), world(4), micro_batch_size=8)
    assert told.what.endswith(", requested 1.5 GiB")
    settings = re.findall(r"\((\w+\.\w+): ", told.fix)
    assert settings == [
        "distributed.strategy",
        "train.micro_batch_size",
        "train.activation_checkpointing",
        "train.precision",
    ]
    assert told.fix == snapshot
    small = table(parameters_bytes=GiB, gradients_bytes=GiB, optimizer_bytes=2 * GiB)
    sharded = out_of_memory_error(error, small, world(4), sharded=True).fix
    assert sharded.endswith("(distributed.fsdp_cpu_offload: true)")
    assert sharded == snapshot
    in_pieces = out_of_memory_error(error, table(used_bytes=12 * GiB), world(1)).fix
    assert in_pieces.endswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert in_pieces == snapshot
