"""Hashes of tensors, batches and random states; equal hashes mean bitwise equal values."""

import gc
import hashlib
import marshal
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_MOST_COPIED_BYTES = 2**20  # from a device to the host; more is hashed on the device
_CHUNK = 2**24
_MIX, _SPREAD = 0x2545F4914F6CDD1D, 0x9E3779B1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
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
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.device.type != "cpu" and flat.nbytes > _MOST_COPIED_BYTES:
        return zlib.crc32(hash_on_device(flat).to_bytes(8, "little"), begun)
    return zlib.crc32(_octets(flat), begun)


def tensors_hash(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of all tensors together."""
    total = 0
    for tensor in tensors:
        total = tensor_hash(tensor, total)
    return f"{total:08x}"


def _octets(flat: torch.Tensor) -> Any:
    """Return the bytes of a contiguous tensor without a copy, if it is on the CPU."""
    return flat.view(torch.uint8).cpu().numpy()


def hash_on_device(flat: torch.Tensor) -> int:
    """Add up all elements, mixed with their position, in integers, whose sum is exact in any order."""
    bits = flat.view(_INTEGERS[flat.itemsize])
    total = 0
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        position = torch.arange(begin, begin + chunk.numel(), device=chunk.device)
        mixed = (chunk + position * _SPREAD) * _MIX
        total += int((mixed ^ (mixed >> 29)).sum())
    return total & (2**64 - 1)


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
            digest.update(_octets(values.contiguous().reshape(-1)))
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


def find_copies(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return objects that hold tensors of the same shapes as the parameters, such as an average of them.

    These are modules, and dictionaries and lists of tensors; the model itself is left out.
    """
    shapes = [parameter.shape for parameter in parameters]
    addresses = {local_tensor(parameter).data_ptr() for parameter in parameters}
    copies = []
    for thing in gc.get_objects():
        tensors = _tensors_of(thing, len(shapes))
        if not all(isinstance(tensor, torch.Tensor) and not tensor.is_meta for tensor in tensors):
            continue
        if not tensors or [tensor.shape for tensor in tensors] != shapes:
            continue
        if addresses.isdisjoint(local_tensor(tensor).data_ptr() for tensor in tensors):
            copies.append(thing)
    return copies


def _tensors_of(thing: Any, count: int) -> list[Any]:
    """Return what a module, a dictionary or a list holds, if it is so many things."""
    kind = type(thing)
    tensors: list[Any] = []
    if kind is dict and len(thing) == count:
        tensors = list(thing.values())
    elif kind is list and len(thing) == count:
        tensors = thing
    elif issubclass(kind, nn.Module):
        tensors = list(thing.parameters())
    return tensors


def copy_hash(copy: Any, count: int) -> str:
    """Return a hash of a copy of the weights that ``find_copies`` found; it has ``count`` parameters."""
    return tensors_hash(_tensors_of(copy, count))
