"""A checkpoint in one file without pickle: tensors as safetensors, everything else as JSON in its header.

Reading such a file runs no code, whoever wrote it. Any other program can read the tensors too.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchmuster.errors import Impossible, MusterError

# Nested dictionaries (with names as keys), lists and tuples of tensors, numbers, texts and None.
Tree: TypeAlias = Any

_HEADER = "torchmuster"  # the entry of the file's metadata that holds the rest of the tree
_TENSOR, _TUPLE = "__tensor__", "__tuple__"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a file holds: its tensors by name, and the tree with names in their places."""

    rest: Any
    tensors: dict[str, torch.Tensor]


def write(path: Path, tree: Tree) -> None:
    """Write a tree; the file is whole or, at any failure, as it was before."""
    tensors: dict[str, torch.Tensor] = {}
    rest = _take_out(tree, (), tensors, {})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={_HEADER: json.dumps(rest)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut can leave the new name with no content
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise MusterError(
            f"the checkpoint {path} could not be written",
            why=str(error),
            fix="look at the free space and the permissions of that folder",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> Tree:
    """Read a tree, its tensors on the CPU; a file of another kind is refused with the way out."""
    return joined(read_parts(path), path)


def read_parts(path: Path) -> Parts:
    """Read what :func:`joined` makes a tree of."""
    _refuse_pickle(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rest = None if header is None else json.loads(header)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if header is None:
        raise Impossible(
            f"{path} is a safetensors file, but not a checkpoint of a trainer",
            why="it holds tensors alone: no epoch and no state of an optimiser",
            fix="for weights alone: safetensors.torch.load_model(model, path), before the model is "
            "given to the trainer",
        )
    return Parts(rest=rest, tensors=tensors)


def joined(parts: Parts, path: Path) -> Tree:
    """Return the tree that was written; ``path`` is named if something of it is not there."""
    try:
        return _put_back(parts.rest, parts.tensors)
    except (KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> MusterError:
    return MusterError(
        f"the checkpoint {path} is damaged",
        why=f"{type(error).__name__}: {error}",
        fix="take an older checkpoint; this one cannot be mended",
    )


def _refuse_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            beginning = file.read(9)
    except OSError as error:
        raise Impossible(
            f"there is no checkpoint to read at {path}", why=error.strerror or str(error)
        ) from None
    # safetensors begins with a length, which can be any bytes, and then a brace.
    if beginning[8:] != b"{" and beginning.startswith((b"PK", b"\x80")):  # torch.save, new and old
        raise Impossible(
            f"{path} was not read: it is a file of torch.save (a pickle), not of save_checkpoint",
            why="loading a pickle can run any code that its writer put there",
            fix="if you trust it, convert it once: saved = torch.load(path, weights_only=True); "
            "load its parts into the model and the optimizer; then trainer.save_checkpoint(…)",
        )


def _take_out(
    tree: Tree,
    place: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    written: dict[tuple[Any, ...], str],
) -> Any:
    """Return the tree as JSON types; its tensors go to ``tensors``, one that is shared only once."""
    if isinstance(tree, torch.Tensor):
        same = (tree.data_ptr(), tree.dtype, tree.shape, tree.stride(), tree.device)
        name = written.get(same) if tree.numel() else None
        if name is None:
            name = "/".join(place)
            whole = tree.detach().cpu().contiguous()
            # safetensors refuses tensors that share memory, so a part of a larger one is copied
            in_part = whole.untyped_storage().nbytes() != whole.nbytes
            tensors[name] = whole.clone() if in_part else whole
            written[same] = name
        return {_TENSOR: name}
    if isinstance(tree, dict):
        return {
            name: _take_out(value, (*place, name), tensors, written) for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        items = [
            _take_out(value, (*place, str(at)), tensors, written) for at, value in enumerate(tree)
        ]
        return items if isinstance(tree, list) else {_TUPLE: items}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise Impossible(
        f"{'/'.join(place)} cannot be kept in a checkpoint: it is a {type(tree).__name__}",
        why="a checkpoint holds tensors, numbers, texts, lists and dictionaries; nothing is pickled",
    )


def _put_back(rest: Any, tensors: dict[str, torch.Tensor]) -> Tree:
    if isinstance(rest, list):
        return [_put_back(item, tensors) for item in rest]
    if not isinstance(rest, dict):
        return rest
    if rest.keys() == {_TENSOR}:
        return tensors[rest[_TENSOR]]
    if rest.keys() == {_TUPLE}:
        return tuple(_put_back(item, tensors) for item in rest[_TUPLE])
    return {name: _put_back(value, tensors) for name, value in rest.items()}
