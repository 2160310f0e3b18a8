"""Many samples on their way from a reading process: all their tensors in a few large ones.

A tensor that goes through torch's queues takes a file descriptor and some 50 microseconds. Thousands of
small ones would use up both, so they travel as one tensor per kind, and come out as views of it.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """Anything, with its tensors taken out. Only ever sent between processes of one rank."""

    words: bytes
    shapes: list[tuple[torch.dtype, torch.Size]]
    flat: dict[torch.dtype, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        """What its tensors take of shared memory."""
        return sum(tensor.nbytes for tensor in self.flat.values())


class _Packer(pickle.Pickler):
    def __init__(self, words: io.BytesIO) -> None:
        super().__init__(words, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided:
            return None
        self.tensors.append(thing.detach().cpu())
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, words: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(words)
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._tensors[place]


def pack(thing: Any) -> Parcel:
    """Make a parcel."""
    words = io.BytesIO()
    packer = _Packer(words)
    packer.dump(thing)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in packer.tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return Parcel(
        words=words.getvalue(),
        shapes=[(tensor.dtype, tensor.shape) for tensor in packer.tensors],
        flat={dtype: torch.cat(some) for dtype, some in by_dtype.items()},
    )


def unpack(parcel: Parcel) -> Any:
    """Open a parcel."""
    begins = dict.fromkeys(parcel.flat, 0)
    tensors = []
    for dtype, shape in parcel.shapes:
        begin = begins[dtype]
        begins[dtype] = begin + shape.numel()
        tensors.append(parcel.flat[dtype][begin : begins[dtype]].view(shape))
    return _Unpacker(io.BytesIO(parcel.words), tensors).load()
