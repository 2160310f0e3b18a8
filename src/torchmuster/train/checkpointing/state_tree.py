"""Split a training state into tensors by name, and the rest as JSON.

Values that JSON cannot represent become a dictionary with one key: tuples, infinite numbers,
dictionaries whose keys are not strings. All of them are restored exactly.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchmuster.errors import Impossible

_TENSOR, _TUPLE, _FLOAT, _PAIRS = "__tensor__", "__tuple__", "__float__", "__pairs__"
_MARKS = (_TENSOR, _TUPLE, _FLOAT, _PAIRS)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the state as JSON types with names in place of tensors, and the tensors by name.

    A name is the path to the tensor: ``model.layers.0.weight``,
    ``optimizer.state.layers.0.weight.exp_avg``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _without_tensors(dict(state), "", tensors), tensors


def unflatten(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the reassembled state; KeyError, TypeError or ValueError if it is not a state."""
    if isinstance(rest, list):
        return [unflatten(value, tensors) for value in rest]
    if not isinstance(rest, dict):
        return rest
    mark = next(iter(rest)) if len(rest) == 1 else ""
    content: Any = rest.get(mark)
    if mark == _TENSOR:
        return tensors[content]
    if mark == _TUPLE:
        return tuple(unflatten(value, tensors) for value in content)
    if mark == _FLOAT:
        return _FLOATS[content]
    if mark == _PAIRS:
        return {unflatten(key, tensors): unflatten(value, tensors) for key, value in content}
    return {key: unflatten(value, tensors) for key, value in rest.items()}


def tied_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the same as an earlier one: ``{later: first}``.

    Of a sharded tensor, only ranks that have a part of it know; rank 0 always has one.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            memory = (local.device, local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if first.setdefault(memory, name) != name:
                tied[name] = first[memory]
    return tied


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise Impossible(
                f"two tensors of the state have the same name, {path}",
                why="a name consists of the keys on the path to the tensor, joined by dots",
                fix="rename one of the keys",
            )
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, list | tuple):
        items = [
            _without_tensors(item, _joined(path, index), tensors)
            for index, item in enumerate(value)
        ]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        content = {
            key: _without_tensors(item, _joined(path, key), tensors) for key, item in value.items()
        }
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return content
        return {
            _PAIRS: [[_without_tensors(key, path, tensors), item] for key, item in content.items()]
        }
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    raise Impossible(
        f"{path} cannot be saved in a checkpoint: it is a {type(value).__name__}",
        why="a checkpoint holds tensors, numbers, strings, lists and dictionaries; nothing is pickled",
        fix="convert it to one of these types",
    )


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
