"""Transfer of variables from a rank to the notebook: data and arrays as MessagePack, never code."""

import sys
from collections import OrderedDict
from typing import Any

import msgspec

from torchmuster.errors import Impossible
from torchmuster.notebook.connection import LONGEST_MESSAGE
from torchmuster.units import format_bytes

_TUPLE, _TENSOR, _ARRAY = 1, 2, 3
_PLAIN = (type(None), bool, int, float, str, bytes)
CAN_BE_PULLED = (
    "numbers, strings, bytes, torch tensors, numpy arrays, and lists, tuples and dicts of these"
)


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    content: bytes


def encode_value(name: str, value: object) -> bytes:
    """Return a variable as bytes; reject non-data with its name."""
    try:
        content = msgspec.msgpack.encode(_packed(value, name))
    except (OverflowError, ValueError, RecursionError) as error:
        raise _refusal(f"cannot pull {name}: {error or type(error).__name__}") from error
    if len(content) >= LONGEST_MESSAGE:
        raise Impossible(
            f"cannot pull {name}: its size is {format_bytes(len(content))}",
            why=f"the limit is {format_bytes(LONGEST_MESSAGE)}",
            fix="pull a part of it, or save it to a file on the rank",
        )
    return content


def decode_value(content: bytes) -> object:
    """Decode a variable; tensors are on the CPU."""
    return msgspec.msgpack.decode(content, ext_hook=_unpacked)


def _packed(value: Any, where: str) -> object:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_packed(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if kind is tuple:
        items = [_packed(item, f"{where}[{place}]") for place, item in enumerate(value)]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    if kind in (dict, OrderedDict):  # such as a state_dict
        odd = [key for key in value if type(key) not in _PLAIN]
        if odd:
            raise _refusal(f"cannot pull {where}: unsupported key {odd[0]!r}")
        return {key: _packed(item, f"{where}[{key!r}]") for key, item in value.items()}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _of_tensor(value, where)
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        array = _Array(value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(array))
    if numpy is not None and isinstance(value, numpy.generic):
        return _packed(value.item(), where)
    raise _refusal(f"cannot pull {where}: it is a {kind.__module__}.{kind.__qualname__}")


def _of_tensor(tensor: Any, where: str) -> msgspec.msgpack.Ext:
    from torchmuster.train.checkpointing.storage import WORDS, byte_pieces

    if tensor.dtype not in WORDS or not _is_strided(tensor):
        raise _refusal(f"cannot pull {where}: it is {tensor.dtype}, {tensor.layout}")
    # Copied while the message exists: its memory is freed with it.
    content = b"".join(bytes(one) for one in byte_pieces(tensor.resolve_conj().resolve_neg()))
    array = _Array(WORDS[tensor.dtype], tuple(tensor.shape), content)
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(array))


def _is_strided(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"


def _unpacked(code: int, data: memoryview) -> object:
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, type=list, ext_hook=_unpacked))
    array = msgspec.msgpack.decode(data, type=_Array)
    if code == _TENSOR:
        return _to_tensor(array)
    if code == _ARRAY:
        import numpy

        return numpy.ndarray(array.shape, array.dtype, bytearray(array.content))
    raise ValueError(f"unknown kind of value: {code}")


def _to_tensor(array: _Array) -> object:
    import torch

    from torchmuster.train.checkpointing.storage import DTYPES

    dtype = DTYPES[array.dtype]
    if not array.content:  # frombuffer does not accept empty buffers
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.content), dtype=dtype).view(array.shape)


def _refusal(what: str) -> Impossible:
    return Impossible(
        what,
        why=f"only data can be pulled: {CAN_BE_PULLED}",
        fix="convert it to data on the rank, such as model.state_dict() or a list, and pull that",
    )
