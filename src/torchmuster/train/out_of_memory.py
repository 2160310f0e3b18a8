"""Report out-of-memory errors: the rank, its memory by category, and what to change."""

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.devices.readers.cpu import read_cpu
from torchmuster.errors import OutOfMemory
from torchmuster.train.world import World, memory_peak
from torchmuster.units import format_bytes

MESSAGES = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "enforce fail at alloc_cpu.cpp",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
HOST_MEMORY = ("cpu", "mps")  # devices whose memory is that of the host
STATES = ("parameters", "gradients", "optimizer states")


def memory_table(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> dict[str, int]:
    """Return this rank's current memory in bytes, by category.

    ``activations and others`` is all that is in use beside the states: gathered shards, and on the
    CPU the program itself. ``parameters`` are those outside of a step: during a step, full copies
    replace some of FSDP's shards.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states: list[torch.Tensor] = []
    if optimizer is not None:
        for state in optimizer.state.values():
            states += [value for value in state.values() if isinstance(value, torch.Tensor)]
    if device.type in HOST_MEMORY:
        used = psutil.Process().memory_info().rss
        limit = read_cpu().total_bytes or 0
    else:
        module = torch.get_device_module(device)
        used = module.memory_allocated(device)
        _, limit = module.mem_get_info(device)
    table = dict(zip(STATES, map(local_bytes, (parameters, gradients, states)), strict=True))
    table["activations and others"] = max(used - sum(table.values()), 0)
    table["in use"] = used
    table["peak"] = memory_peak(device)
    table["limit"] = limit
    return table


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
    parameters = [] if model is None else list(model.parameters())
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        table = memory_table(parameters, optimizer, world.device)
        lines = [f"{name:<27} {format_bytes(size):>9}" for name, size in table.items()]
        raise OutOfMemory(
            f"rank {world.global_rank} on {platform.node()} ({world.device}) ran out of memory",
            why="\n".join([*str(error).splitlines()[:1], *lines]),
            fix="\n".join(fixes(table, world, micro_batch_size, parameters)),
        ) from error


def fixes(
    table: dict[str, int],
    world: World,
    micro_batch_size: int | None,
    parameters: Sequence[nn.Parameter],
) -> list[str]:
    """Return what to change; first what makes the larger part smaller: states or activations."""
    states_bytes = sum(table[name] for name in STATES)
    size = format_bytes(states_bytes)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        states = (
            f"use more ranks: each keeps a share of the {size} of model states; or keep the shards in "
            "host memory (distributed.fsdp_cpu_offload: true)"
        )
    else:
        states = (
            f"use fsdp on several ranks: each keeps a share of the {size} of model states "
            "(distributed.strategy: fsdp)"
        )
    activations = [
        "recompute activations (train.activation_checkpointing: full)",
        "use bf16 instead of fp32: half the activations (train.precision: bf16)",
    ]
    if micro_batch_size != 1:
        smaller = "smaller"
        if micro_batch_size is not None:
            smaller = f"{micro_batch_size // 2} instead of {micro_batch_size}"
        activations.insert(
            0,
            "use a smaller micro-batch with more accumulation: the same step with fewer activations "
            f"at a time (train.micro_batch_size: {smaller})",
        )
    if states_bytes > table["activations and others"]:
        return [states, *activations]
    return [*activations, states]
