"""Report out-of-memory errors: rank, phase, requested size, memory by category, and fixes."""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchmuster.devices.readers import cpu
from torchmuster.errors import OutOfMemory
from torchmuster.train.world import World
from torchmuster.units import format_bytes, parse_bytes

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes on this rank; a sharded tensor counts with its shard. Unreadable values are None."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    device: torch.device
    used_bytes: int | None  # by tensors on an accelerator, by this process on the CPU
    peak_bytes: int | None
    reserved_bytes: int | None  # from the accelerator, in use or not; None on the CPU
    # On the accelerator: NCCL's buffers, contexts, other processes. None: unknown, or the CPU.
    outside_bytes: int | None = None
    limit_bytes: int | None  # available to this process
    gathered_bytes: int | None = (
        None  # temporary full copies of sharded parameters; None: unsharded
    )
    address_space_bytes: int | None = None  # in use; only if address space is limited

    @property
    def states_bytes(self) -> int:
        """Memory kept between steps: parameters, gradients, optimizer states and buffers."""
        return sum(size for _, size in self.states)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """Memory kept between steps, by category."""
        return (
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer states", self.optimizer_bytes),
            ("buffers", self.buffers_bytes),
        )

    @property
    def rest_bytes(self) -> int | None:
        """All other memory in use: activations, and on the CPU the program itself."""
        if self.used_bytes is None:
            return None
        return max(self.used_bytes - self.states_bytes - (self.gathered_bytes or 0), 0)

    def lines(self) -> list[str]:
        """Return the table as aligned text lines."""
        own = self.device.type == "cpu"
        rows = [
            *self.states,
            ("gathered blocks", self.gathered_bytes),
            ("activations and the program" if own else "activations and others", self.rest_bytes),
            ("in use by this process" if own else "in use by tensors", self.used_bytes),
            ("peak", self.peak_bytes),
            ("reserved", self.reserved_bytes),
            ("outside of torch", self.outside_bytes),
            ("address space in use", self.address_space_bytes),
            ("limit", self.limit_bytes),
        ]
        known = [(name, format_bytes(size)) for name, size in rows if size is not None]
        return [f"{name:<27} {size:>9}" for name, size in known]


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
    present = list(model.parameters()) if model is not None else []
    parameters = present if shards is None else shards
    known = {id(parameter) for parameter in parameters}
    copies = [one for one in present if id(one) not in known]
    states = [
        value
        for state in (optimizer.state.values() if optimizer is not None else ())
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    host = _of_process() if device.type == "cpu" else None
    used, peak, reserved, limit, outside = (
        (*host[:4], None) if host is not None else _of_device(device)
    )
    return MemoryTable(
        parameters_bytes=local_bytes(parameters),
        gradients_bytes=local_bytes(_gradients(parameters)),
        optimizer_bytes=local_bytes(states),
        buffers_bytes=local_bytes(model.buffers()) if model is not None else 0,
        gathered_bytes=None if shards is None else local_bytes([*copies, *_gradients(copies)]),
        device=device,
        used_bytes=used,
        peak_bytes=peak,
        reserved_bytes=reserved,
        outside_bytes=outside,
        limit_bytes=limit,
        address_space_bytes=host[4] if host is not None else None,
    )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors here: local shards only, shared memory counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_meta:
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _of_process() -> tuple[int | None, int | None, None, int | None, int | None]:
    """Return used, peak, reserved (None) and limit bytes, and address space if limited."""
    memory = psutil.Process().memory_info()
    limit, peak, address_space = cpu.read_cpu().total_bytes, None, None
    if resource is not None:
        # Linux counts in KiB. ru_maxrss is kept over exec, so it can be that of a larger parent.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
            soft = resource.getrlimit(kind)[0]
            if soft != resource.RLIM_INFINITY and (limit is None or soft < limit):
                limit = soft
                # It is far more than resident memory, so only this is comparable with the limit.
                address_space = memory.vms if kind == resource.RLIMIT_AS else None
    return memory.rss, peak, None, limit, address_space


def _of_device(device: torch.device) -> tuple[int | None, ...]:
    """Return used, peak, reserved and limit bytes, and those that torch's allocator does not have."""
    module = torch.get_device_module(device)

    def ask(name: str) -> Any:
        # Not every accelerator reports all values.
        asked = getattr(module, name, None)
        return asked(device) if asked is not None else None

    reserved, free_and_limit = ask("memory_reserved"), ask("mem_get_info")
    limit = outside = None
    if free_and_limit is not None:
        free, limit = free_and_limit
        outside = max(limit - free - (reserved or 0), 0)
    return (
        ask("memory_allocated"),
        ask("max_memory_allocated"),
        reserved,
        limit,
        outside,
    )


_WORDS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "enforce fail at alloc_cpu.cpp",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_BYTES_ASKED = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_SIZE_ASKED = re.compile(r"tried to allocate ([\d.]+ ?[KMGT]?i?B)", re.IGNORECASE)
# The outermost of these in a traceback gives the phase. Paths are those of torch and this package.
_PHASES = (
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, on an accelerator or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


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
    # During a step, full copies replace some shards, so record the shards before.
    shards = list(model.parameters()) if model is not None and _is_sharded(model) else None
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        table = memory_table(model, optimizer, world.device, shards=shards)
        sharded = model is not None and _is_sharded(model)
        raise out_of_memory_error(
            error, table, world, sharded=sharded, micro_batch_size=micro_batch_size
        ) from error


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def out_of_memory_error(
    error: BaseException,
    table: MemoryTable,
    world: World,
    *,
    sharded: bool = False,
    micro_batch_size: int | None = None,
) -> OutOfMemory:
    """Return the error with the memory table and the fixes."""
    asked = _asked(str(error))
    amount = f", requested {format_bytes(asked)}" if asked is not None else ""
    phase = _out_of_memory_phase(error.__traceback__)
    return OutOfMemory(
        f"rank {world.global_rank} on {platform.node()} ({world.device}) ran out of memory {phase}{amount}",
        why="\n".join(table.lines()),
        fix="\n".join(_fixes(table, world, sharded, micro_batch_size)),
    )


def _asked(text: str) -> int | None:
    if found := _BYTES_ASKED.search(text):
        return int(found[1])
    found = _SIZE_ASKED.search(text)
    return parse_bytes(found[1]) if found else None


def _out_of_memory_phase(trace: TracebackType | None) -> str:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        for part, phase in _PHASES:
            if part in file:
                return phase
        trace = trace.tb_next
    return "outside of the model"


def _fixes(
    table: MemoryTable, world: World, sharded: bool, micro_batch_size: int | None
) -> Iterator[str]:
    """Yield the fixes, most effective first."""
    rest = table.rest_bytes or 0
    for_states = list(_less_states(table, world, sharded))
    for_activations = list(_less_activations(micro_batch_size))
    if table.states_bytes > rest:
        yield from for_states + for_activations
    else:
        yield from for_activations + for_states
    reserved, used = table.reserved_bytes or 0, table.used_bytes or 0
    if used and reserved > 1.3 * used and not _has_expandable_segments():
        yield (
            f"{format_bytes(reserved - used)} are reserved but too fragmented to use: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True"
        )


def _has_expandable_segments() -> bool:
    return any(
        name.endswith("_ALLOC_CONF") and "expandable_segments:true" in value.lower()
        for name, value in os.environ.items()
    )


def _less_states(table: MemoryTable, world: World, sharded: bool) -> Iterator[str]:
    size = format_bytes(table.states_bytes)
    if sharded:
        yield f"use more ranks: each keeps a share of the {size} of model states"
        yield "keep the shards in host memory (distributed.fsdp_cpu_offload: true)"
    elif world.world_size > 1:
        share = format_bytes(table.states_bytes // world.world_size)
        yield (
            f"use fsdp: of the {size} of model states, each of {world.world_size} ranks keeps "
            f"{share} (distributed.strategy: fsdp)"
        )
    else:
        yield (
            f"use fsdp on several ranks: each keeps a share of the {size} of model states "
            "(distributed.strategy: fsdp)"
        )


def _less_activations(micro_batch_size: int | None) -> Iterator[str]:
    if micro_batch_size is not None and micro_batch_size > 1:
        half = micro_batch_size // 2
        yield (
            f"use a micro-batch of {half} instead of {micro_batch_size} with twice the "
            "accumulation: the same "
            f"step with half the activations (train.micro_batch_size: {half})"
        )
    elif micro_batch_size is None:
        yield (
            "use a smaller micro-batch with more accumulation: the same step with fewer "
            "activations at a time "
            "(train.micro_batch_size)"
        )
    yield "recompute activations (train.activation_checkpointing: full, or selective)"
    yield "use bf16 instead of fp32: half the activations (train.precision: bf16)"
