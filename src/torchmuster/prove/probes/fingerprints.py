"""Hashes of tensors, batches and random states; equal hashes mean bitwise equal values."""

import hashlib
import marshal
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_DEEPEST = 4  # of a nested batch


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without its gradient history."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor


def tensor_hash(tensor: torch.Tensor, begun: int = 0) -> int:
    """Return a hash of the bytes of a tensor, continuing one that was begun."""
    tensor = local_tensor(tensor)
    if tensor.layout is not torch.strided:
        return zlib.crc32(repr(tensor.layout).encode(), begun)
    return zlib.crc32(_octets(tensor), begun)


def tensors_hash(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of all tensors together."""
    total = 0
    for tensor in tensors:
        total = tensor_hash(tensor, total)
    return f"{total:08x}"


def _octets(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def random_states() -> dict[str, str]:
    """Return hashes of the global random states that a script can use."""
    states = {
        "python": zlib.crc32(marshal.dumps(random.getstate())),
        "torch": tensor_hash(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = zlib.crc32(repr(rest).encode(), zlib.crc32(keys))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = tensor_hash(torch.cuda.get_rng_state())
    return {name: f"{value:08x}" for name, value in states.items()}


def data_tensors(batch: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch that the model did not compute, with their names."""
    if isinstance(batch, torch.Tensor):
        if not batch.requires_grad:
            yield "", batch
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if depth == _DEEPEST:
        return
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, list | tuple):
        parts = enumerate(batch)
    elif hasattr(batch, "__dict__") and not callable(batch) and not isinstance(batch, type):
        parts = vars(batch).items()  # a dataclass, or the batch of a graph library
    for name, part in parts:
        for inner, tensor in data_tensors(part, depth + 1):
            yield inner or str(name), tensor


def sample_hashes(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a hash for each sample: the rows of all tensors that have as many rows as the first one.

    Padding, which depends on the other samples of the batch, does not count if there is an ``attention_mask``.
    """
    parts: list[torch.Tensor] = []
    mask = None
    for name, tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.numel() or not tensor.dim():
            continue
        part = local_tensor(tensor).cpu()
        if parts and len(part) != len(parts[0]):
            continue
        parts.append(part)
        if name == "attention_mask" and part.dim() == 2:
            mask = part.bool()
    hashes = []
    for row in range(len(parts[0]) if parts else 0):
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            values = part[row]
            if mask is not None and values.shape == mask[row].shape:
                values = values[mask[row]]
            digest.update(_octets(values))
        hashes.append(digest.hexdigest())
    return hashes


def optimizer_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return a hash for each name in the state of optimizers, such as ``exp_avg``."""
    hashes: dict[str, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    begun = hashes.get(name, 0)
                    if isinstance(value, torch.Tensor):
                        hashes[name] = tensor_hash(value, begun)
                    elif isinstance(value, int | float):
                        hashes[name] = zlib.crc32(repr(value).encode(), begun)
    return {str(name): f"{value:08x}" for name, value in hashes.items()}


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared L2 norm of this rank's parts of tensors together."""
    parts = []
    for tensor in map(local_tensor, tensors):
        parts.append(tensor.float() if tensor.itemsize < 4 else tensor)
    return float(nn.utils.get_total_norm(parts)) ** 2
