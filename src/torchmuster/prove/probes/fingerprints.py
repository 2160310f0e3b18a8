"""Hashes of tensors, batches and random states; equal hashes mean bitwise equal values."""

import gc
import marshal
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from torchmuster.prove.records import EventRecord

_MOST_COPIED_BYTES = 2**20  # from a device to the host; more is hashed on the device
_CHUNK = 2**24
_FEW_TENSORS = 32
_MIX, _SPREAD = 0x2545F4914F6CDD1D, 0x9E3779B1
_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
_PLAIN = {torch.Tensor, nn.Parameter}
_DEEPEST = 4  # of a nested batch


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without its gradient history."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    local = getattr(tensor, "to_local", None)
    return local() if local is not None else tensor


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a rank holds only a part of a parameter, if it is a DTensor."""
    placements = getattr(parameter, "placements", None)
    if placements is not None:
        return not all(placement.is_replicate() for placement in placements)
    return False


def tensor_hash(tensor: torch.Tensor, begun: int = 0) -> int:
    """Return a hash of the bytes of a tensor, continuing one that was begun."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    if is_plain and tensor.dtype in _OF_NUMPY and tensor.device.type == "cpu":
        array: Any = tensor.detach().numpy()  # without a copy: most tensors of a small model
        if array.flags.c_contiguous:
            return zlib.crc32(array, begun)
    tensor = local_tensor(tensor)
    if tensor.layout is not torch.strided:
        return zlib.crc32(repr(tensor.layout).encode(), begun)
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.device.type != "cpu" and flat.nbytes > _MOST_COPIED_BYTES:
        return zlib.crc32(hash_on_device(flat).to_bytes(8, "little"), begun)
    return zlib.crc32(_octets(flat), begun)


def _octets(flat: torch.Tensor) -> Any:
    """Return the bytes of a contiguous tensor without a copy, if it is on the CPU."""
    return flat.view(torch.uint8).cpu().numpy()


def hash_on_device(flat: torch.Tensor) -> int:
    """Add up all elements, mixed with their position, in integers, whose sum is exact in any order."""
    bits = flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    )
    total = 0
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        place = torch.arange(begin, begin + chunk.numel(), device=chunk.device)
        mixed = (chunk + place * _SPREAD) * _MIX
        total += int((mixed ^ (mixed >> 29)).sum())
    return total & (2**64 - 1)


def text_hash(number: int) -> str:
    """Return a hash as text."""
    return f"{number:08x}"


def random_states() -> dict[str, str]:
    """Return hashes of the global random states that a script can use."""
    states = {
        "python": zlib.crc32(marshal.dumps(random.getstate())),
        "torch": tensor_hash(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, *rest = numpy.random.get_state()
        states["numpy"] = zlib.crc32(repr((kind, position, rest)).encode(), zlib.crc32(keys))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = tensor_hash(torch.cuda.get_rng_state())
    return {name: text_hash(value) for name, value in states.items()}


def data_tensors(batch: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch that the model did not compute, with their names."""
    if isinstance(batch, torch.Tensor):
        if not batch.requires_grad:
            yield "", batch
        return
    if depth == _DEEPEST:
        return
    if isinstance(batch, Mapping):
        parts: Iterable[tuple[Any, Any]] = batch.items()
    elif isinstance(batch, list | tuple):
        parts = enumerate(batch)
    elif hasattr(batch, "__dict__") and not callable(batch) and not isinstance(batch, type):
        parts = vars(batch).items()  # a dataclass, or the batch of a graph library
    else:
        return
    for name, part in parts:
        for inner, tensor in data_tensors(part, depth + 1):
            yield inner or str(name), tensor


def sample_hashes(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a hash for each sample: the rows of all tensors that have as many rows as the first one.

    Padding, which depends on the other samples of the batch, does not count if there is an ``attention_mask``.
    """
    rows, mask = 0, None
    parts: list[torch.Tensor] = []
    for name, tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.numel() or not tensor.dim():
            continue
        rows = rows or len(tensor)
        if len(tensor) == rows:
            part = local_tensor(tensor).cpu().contiguous()
            parts.append(part)
            if name == "attention_mask" and part.dim() == 2:
                mask = part.bool()
    hashes = []
    for row in range(rows):
        values = [part[row].reshape(-1) for part in parts]
        if mask is not None:
            values = [_unpadded(value, mask[row]) for value in values]
        hashes.append(_row_hash(values))
    return hashes


def _unpadded(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a row without padding, if it is as long as its mask."""
    if values.shape == mask.shape:
        return values[mask]
    return values


def _row_hash(parts: Sequence[torch.Tensor]) -> str:
    crc = adler = 1
    for part in parts:
        octets = _octets(part.contiguous())
        crc, adler = zlib.crc32(octets, crc), zlib.adler32(octets, adler)
    return f"{crc:08x}{adler:08x}"


def buffers_hash(module: nn.Module) -> str:
    """Return a hash of all buffers of a module; "" if it has none."""
    total, found = 0, False
    for _, buffer in module.named_buffers():
        total, found = tensor_hash(buffer, total), True
    return text_hash(total) if found else ""


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
    return {str(name): text_hash(value) for name, value in hashes.items()}


def squared_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the squared L2 norm of tensors together."""
    if not tensors:
        return 0.0
    tensors = [one.float() if one.itemsize < 4 else one for one in map(local_tensor, tensors)]
    if len(tensors) <= _FEW_TENSORS:  # a call for all of them costs more
        return sum(float(torch.linalg.vector_norm(one)) ** 2 for one in tensors)
    return float(nn.utils.get_total_norm(tensors)) ** 2


def find_copies(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return objects that hold tensors of the same shapes as the parameters, such as an average of them.

    These are modules, and dictionaries and lists of tensors; the model itself is left out.
    """
    shapes = [tuple(parameter.shape) for parameter in parameters]
    own = {id(parameter) for parameter in parameters}
    places = {parameter.data_ptr() for parameter in map(local_tensor, parameters)}

    def is_copy(tensors: Sequence[Any]) -> bool:
        return (
            len(tensors) == len(shapes)
            and all(isinstance(one, torch.Tensor) and not one.is_meta for one in tensors)
            and [tuple(one.shape) for one in tensors] == shapes
            and not any(id(one) in own or local_tensor(one).data_ptr() in places for one in tensors)
        )

    found: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is dict or kind is list:
            if len(thing) == len(shapes) and is_copy(
                list(thing.values() if kind is dict else thing)
            ):
                found.append(thing)
        elif issubclass(kind, nn.Module) and is_copy(list(thing.parameters())):
            found.append(thing)
    return found


def copy_hash(copy: Any) -> str:
    """Return a hash of a copy of the weights."""
    if isinstance(copy, nn.Module):
        tensors = list(copy.parameters())
    else:
        tensors = list(copy.values()) if isinstance(copy, dict) else copy
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            total = tensor_hash(tensor, total)
    return text_hash(total)


class SeedsOfWorkers:
    """A ``worker_init_fn`` that calls the script's own one, and then records the random states."""

    def __init__(
        self, usual: Callable[[int], None] | None, into: str, loader: int, iteration: int
    ) -> None:
        self.own, self._into = usual, into
        self._loader, self._iteration = loader, iteration

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        if self.own is not None:
            self.own(worker)
        event = EventRecord(
            kind="worker",
            step=self._iteration,
            values={**random_states(), "worker": str(worker), "loader": str(self._loader)},
        )
        path = Path(self._into) / f"rank-{os.environ.get('RANK', '0')}.workers.jsonl"
        with path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
