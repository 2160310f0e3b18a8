"""The bytes of tensors, as safetensors has them, without a second copy of all of them."""

import ctypes
from collections.abc import Iterator, Mapping

import torch

from torchmuster.errors import Impossible

WORDS: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
DTYPES: Mapping[str, torch.dtype] = {word: dtype for dtype, word in WORDS.items()}

# Large enough that hashing and writing are one long call each, in which other threads compute.
_PIECE_BYTES = 4 * 2**20


def refuse_unknown(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for a tensor of a type that safetensors has no word for."""
    for name, tensor in tensors.items():
        if tensor.dtype not in WORDS or tensor.layout is not torch.strided:
            raise Impossible(
                f"{name} cannot be kept in a checkpoint: it is {tensor.dtype}, {tensor.layout}",
                why="safetensors has no word for that",
                fix=f"keep it as {', '.join(str(one) for one in WORDS)}",
            )


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, wherever it is."""
    host = tensor.detach().cpu().contiguous()
    yield from pieces_of(host)


def pieces_of(host: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous tensor of the host, piece by piece."""
    if not host.nbytes:
        return
    # torch gives a buffer through numpy alone, which is not everywhere, and does not know bfloat16.
    array = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    content = memoryview(array).cast("B")
    for begin in range(0, len(content), _PIECE_BYTES):
        yield content[begin : begin + _PIECE_BYTES]
