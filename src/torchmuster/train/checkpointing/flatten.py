"""Split a training state into tensors by name, and the rest as JSON.

Values that JSON cannot represent become a dictionary with one key: tuples, infinite numbers,
dictionaries whose keys are not strings. All of them are restored exactly.
"""

import math
from collections.abc import Iterator, Mapping
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
    return _flatten_written(dict(state), (), tensors), tensors


def unflatten(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the reassembled state; KeyError, TypeError or ValueError if it is not a state."""
    if isinstance(rest, list):
        return [unflatten(one, tensors) for one in rest]
    if not isinstance(rest, dict):
        return rest
    mark = next(iter(rest)) if len(rest) == 1 else ""
    content: Any = rest.get(mark)
    if mark == _TENSOR:
        return tensors[content]
    if mark == _TUPLE:
        return tuple(unflatten(one, tensors) for one in content)
    if mark == _FLOAT:
        return _FLOATS[content]
    if mark == _PAIRS:
        return {unflatten(key, tensors): unflatten(value, tensors) for key, value in content}
    return {key: unflatten(value, tensors) for key, value in rest.items()}


def shared_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the same as an earlier one: ``{later: first}``.

    For a sharded tensor only ranks with a shard know; rank 0 always has one.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            place = (local.device, local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if first.setdefault(place, name) != name:
                tied[name] = first[place]
    return tied


def _flatten_written(part: Any, way: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(part, torch.Tensor):
        name = ".".join(way)
        if name in tensors:
            raise Impossible(
                f"two tensors of the state have the same name, {name}",
                why="a name consists of the keys on the path to the tensor, joined by dots",
                fix="rename one of the keys",
            )
        tensors[name] = part.detach()
        return {_TENSOR: name}
    if isinstance(part, dict):
        if all(isinstance(key, str) and key not in _MARKS for key in part):
            return {
                key: _flatten_written(value, (*way, key), tensors) for key, value in part.items()
            }
        return {_PAIRS: list(_written_pairs(part, way, tensors))}
    if isinstance(part, list):
        return [_flatten_written(one, (*way, str(at)), tensors) for at, one in enumerate(part)]
    if isinstance(part, tuple):
        return {
            _TUPLE: [_flatten_written(one, (*way, str(at)), tensors) for at, one in enumerate(part)]
        }
    if isinstance(part, float) and not math.isfinite(part):
        return {_FLOAT: str(float(part))}
    if part is None or isinstance(part, bool | int | float | str):
        return part
    raise Impossible(
        f"{'.'.join(way)} cannot be saved in a checkpoint: it is a {type(part).__name__}",
        why="a checkpoint holds tensors, numbers, strings, lists and dictionaries; nothing is "
        "pickled",
        fix="convert it to one of these types",
    )


def _written_pairs(
    part: dict[Any, Any], way: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> Iterator[list[Any]]:
    for key, value in part.items():
        yield [
            _flatten_written(key, (*way, "key"), tensors),
            _flatten_written(value, (*way, str(key)), tensors),
        ]
