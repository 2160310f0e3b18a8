"""What takes this rank's memory: a table by purpose."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.devices.readers import cpu
from torchmuster.units import format_bytes

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes on this rank; a sharded tensor counts with its shard. What could not be read is None."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    device: torch.device
    used_bytes: int | None  # by tensors on an accelerator, by this process on the CPU
    peak_bytes: int | None
    reserved_bytes: int | None  # from the accelerator, in use or not; None on the CPU
    limit_bytes: int | None  # what there is for this process
    gathered_bytes: int | None = (
        None  # whole copies of sharded parameters, for now; None: unsharded
    )
    address_space_bytes: int | None = None  # in use; only where the limit is one of address space

    @property
    def states_bytes(self) -> int:
        """What stays between steps: parameters, gradients, optimiser states and buffers."""
        return sum(size for _, size in self.states)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """What stays between steps, by name."""
        return (
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimiser states", self.optimizer_bytes),
            ("buffers", self.buffers_bytes),
        )

    @property
    def rest_bytes(self) -> int | None:
        """What is in use beside all that: activations, and on the CPU the program itself."""
        if self.used_bytes is None:
            return None
        return max(self.used_bytes - self.states_bytes - (self.gathered_bytes or 0), 0)

    def lines(self) -> list[str]:
        """Return the table for people, aligned."""
        own = self.device.type == "cpu"
        rows = [
            *self.states,
            ("gathered blocks", self.gathered_bytes),
            ("activations and the program" if own else "activations and others", self.rest_bytes),
            ("in use by this process" if own else "in use by tensors", self.used_bytes),
            ("peak", self.peak_bytes),
            ("reserved", self.reserved_bytes),
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
    """Say what this rank's memory is used for at the moment.

    ``shards`` are the parameters of a model that FSDP shards, as they are outside of a step: inside of one,
    whole copies take the places of some.
    """
    present = list(model.parameters()) if model is not None else []
    parameters = present if shards is None else shards
    known = {id(one) for one in parameters}
    copies = [one for one in present if id(one) not in known]
    states = [
        value
        for state in (optimizer.state.values() if optimizer is not None else ())
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    host = _of_process() if device.type == "cpu" else None
    used, peak, reserved, limit = host[:4] if host is not None else _of_device(device)
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
        limit_bytes=limit,
        address_space_bytes=host[4] if host is not None else None,
    )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Add up what tensors take here: shards with their part, what shares memory once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_meta:
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _of_process() -> tuple[int | None, int | None, None, int | None, int | None]:
    """Return what is in use, the peak, nothing reserved, the limit, and address space if that is limited."""
    memory = psutil.Process().memory_info()
    limit, peak, address_space = cpu.read().total_bytes, None, None
    if resource is not None:
        # Linux counts in KiB. ru_maxrss is kept over exec, so it can be that of a larger parent.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
            soft = resource.getrlimit(kind)[0]
            if soft != resource.RLIM_INFINITY and (limit is None or soft < limit):
                limit = soft
                # It is far more than what is in memory, so only this can be held against the limit.
                address_space = memory.vms if kind == resource.RLIMIT_AS else None
    return memory.rss, peak, None, limit, address_space


def _of_device(device: torch.device) -> tuple[int | None, int | None, int | None, int | None]:
    module = torch.get_device_module(device)

    def ask(name: str) -> Any:
        # Not every kind of accelerator tells everything.
        asked = getattr(module, name, None)
        return asked(device) if asked is not None else None

    limit = ask("mem_get_info")
    return (
        ask("memory_allocated"),
        ask("max_memory_allocated"),
        ask("memory_reserved"),
        limit[1] if limit is not None else None,
    )
