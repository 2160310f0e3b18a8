"""Report out-of-memory errors: rank, phase, requested size, memory by category, and fixes."""

import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchmuster.errors import OutOfMemory
from torchmuster.train.world import World
from torchmuster.units import format_bytes, parse_bytes

MESSAGES = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "enforce fail at alloc_cpu.cpp",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
HOST_MEMORY = ("cpu", "mps")  # devices whose memory is that of the host
REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", re.IGNORECASE)
# The outermost of these in a traceback gives the phase. Paths are those of torch and this package.
PHASES = (
    ("/torchmuster/train/models/meta_init.py", "while initializing the model's weights"),
    ("/torchmuster/train/strategies/states.py", "while initializing the model's weights"),
    ("/torch/autograd/", "in the backward pass"),
    ("/torch/_tensor.py", "in the backward pass"),
    ("/torch/optim/", "in the optimizer step"),
    ("/torch/nn/utils/clip_grad.py", "during gradient clipping"),
    ("/torch/nn/parallel/distributed.py", "in the forward pass"),
    ("/torch/nn/modules/", "in the forward pass"),
    ("/torch/distributed/", "during communication"),
    ("/torch/utils/data/", "during data loading"),
)


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes on this rank; a sharded tensor counts with its shard."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    device: torch.device
    used_bytes: int  # by tensors on an accelerator, by this process on the CPU
    peak_bytes: int
    limit_bytes: int | None  # of the device; None if unknown
    reserved_bytes: int | None = None  # by torch on an accelerator, in use or not
    outside_bytes: int | None = None  # on an accelerator: NCCL, contexts and other processes

    @property
    def states(self) -> dict[str, int]:
        """Memory kept between steps, by category."""
        return {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer states": self.optimizer_bytes,
            "buffers": self.buffers_bytes,
        }

    @property
    def states_bytes(self) -> int:
        """Memory kept between steps."""
        return sum(self.states.values())

    @property
    def rest_bytes(self) -> int:
        """All other memory in use: activations, gathered shards, and on the CPU the program itself."""
        return max(self.used_bytes - self.states_bytes, 0)

    def lines(self) -> list[str]:
        """Return the table as aligned text lines."""
        on_host = self.device.type in HOST_MEMORY
        rows = {
            **self.states,
            "activations and the program" if on_host else "activations and others": self.rest_bytes,
            "in use by this process" if on_host else "in use by tensors": self.used_bytes,
            "peak": self.peak_bytes,
            "reserved": self.reserved_bytes,
            "outside of torch": self.outside_bytes,
            "limit": self.limit_bytes,
        }
        lines = []
        for name, size in rows.items():
            if size is not None:
                lines.append(f"{name:<27} {format_bytes(size):>9}")
        return lines


def memory_table(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    shards: Sequence[nn.Parameter] | None = None,
) -> MemoryTable:
    """Return this rank's current memory use by category.

    ``shards`` are the parameters of an FSDP model as they are outside of a step; during a step,
    full copies replace some of them.
    """
    parameters = shards or ([] if model is None else list(model.parameters()))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states: list[torch.Tensor] = []
    if optimizer is not None:
        for state in optimizer.state.values():
            states += [value for value in state.values() if isinstance(value, torch.Tensor)]
    reserved = outside = None
    if device.type in HOST_MEMORY:
        used = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        from torchmuster.devices.readers import cpu

        limit = cpu.read_cpu().total_bytes
    else:
        module = torch.get_device_module(device)
        used = module.memory_allocated(device)
        peak = module.max_memory_allocated(device)
        reserved = module.memory_reserved(device)
        free, limit = module.mem_get_info(device)
        outside = max(limit - free - reserved, 0)
    return MemoryTable(
        parameters_bytes=local_bytes(parameters),
        gradients_bytes=local_bytes(gradients),
        optimizer_bytes=local_bytes(states),
        buffers_bytes=0 if model is None else local_bytes(model.buffers()),
        device=device,
        used_bytes=used,
        peak_bytes=peak,
        limit_bytes=limit,
        reserved_bytes=reserved,
        outside_bytes=outside,
    )


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors here: local shards only, shared memory counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_meta:
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, on an accelerator or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


@contextmanager
def oom_report(
    world: World,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    micro_batch_size: int | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside the ``with`` into one that shows this rank's memory table.

    The exception propagates, so the rank exits at once; the launcher (``muster run`` or torchrun)
    stops the ranks that wait for it.
    """
    shards = None  # recorded here, because full copies replace some of them during a step
    if model is not None and any(isinstance(module, FSDPModule) for module in model.modules()):
        shards = list(model.parameters())
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        table = memory_table(model, optimizer, world.device, shards=shards)
        raise out_of_memory_error(
            error, table, world, sharded=shards is not None, micro_batch_size=micro_batch_size
        ) from error


def out_of_memory_error(
    error: BaseException,
    table: MemoryTable,
    world: World,
    *,
    sharded: bool = False,
    micro_batch_size: int | None = None,
) -> OutOfMemory:
    """Return the error with the memory table and the fixes, most effective first."""
    requested = REQUESTED.search(str(error))
    amount = ""
    if requested is not None:
        number, unit = requested[1], requested[2]
        size = round(float(number)) if unit == "bytes" else parse_bytes(number + unit)
        amount = f", requested {format_bytes(size)}"
    fixes = [
        "recompute activations (train.activation_checkpointing: full, or selective)",
        "use bf16 instead of fp32: half the activations (train.precision: bf16)",
    ]
    if micro_batch_size != 1:
        fixes.insert(0, less_activations(micro_batch_size))
    if table.states_bytes > table.rest_bytes:
        fixes.insert(0, less_states(table, world, sharded=sharded))
    else:
        fixes.append(less_states(table, world, sharded=sharded))
    reserved = table.reserved_bytes or 0
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "")
    settings += os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if reserved > 1.3 * table.used_bytes and "expandable_segments" not in settings:
        fixes.append(
            f"{format_bytes(reserved - table.used_bytes)} are reserved but too fragmented to use: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    return OutOfMemory(
        f"rank {world.global_rank} on {platform.node()} ({world.device}) ran out of memory "
        f"{phase_of(error.__traceback__)}{amount}",
        why="\n".join(table.lines()),
        fix="\n".join(fixes),
    )


def phase_of(trace: TracebackType | None) -> str:
    """Return during what an error was raised."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        for part, phase in PHASES:
            if part in file:
                return phase
        trace = trace.tb_next
    return "outside of the model"


def less_states(table: MemoryTable, world: World, *, sharded: bool) -> str:
    """Return how parameters, gradients and optimizer states take less memory on this rank."""
    size = format_bytes(table.states_bytes)
    if sharded:
        return (
            f"use more ranks: each keeps a share of the {size} of model states; or keep the shards in "
            "host memory (distributed.fsdp_cpu_offload: true)"
        )
    share = ""
    if world.world_size > 1:
        share = f", here {format_bytes(table.states_bytes // world.world_size)}"
    return (
        f"use fsdp on several ranks: each keeps a share of the {size} of model states{share} "
        "(distributed.strategy: fsdp)"
    )


def less_activations(micro_batch_size: int | None) -> str:
    """Return how a rank computes fewer samples at a time."""
    size = "smaller"
    if micro_batch_size is not None:
        size = f"{micro_batch_size // 2} instead of {micro_batch_size}"
    return (
        "use a smaller micro-batch with more accumulation: the same step with fewer activations at a "
        f"time (train.micro_batch_size: {size})"
    )
