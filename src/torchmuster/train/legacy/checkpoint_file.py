"""One checkpoint file for all ranks: rank 0 writes and reads it, the others wait and receive.

Every function here is a collective. Only rank 0 needs to see the file, so hosts need no shared
disk, and all ranks have the same state afterwards. An error on rank 0 is raised on every rank.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.world import World, all_gather_object

# Nested dictionaries (with names as keys), lists and tuples of tensors, numbers, strings and None.
Tree: TypeAlias = Any

_HEADER = "torchmuster"  # the entry of the file's metadata that holds the rest of the tree
_TENSOR, _TUPLE = "__tensor__", "__tuple__"


@dataclass(frozen=True, kw_only=True)
class FileParts:
    """The content of a file: its tensors by name, and the tree with names in their places."""

    rest: Any
    tensors: dict[str, torch.Tensor]


def write_parts(path: Path, tree: Tree) -> None:
    """Write a tree; the file is complete or, after any failure, unchanged."""
    tensors: dict[str, torch.Tensor] = {}
    rest = _take_out(tree, (), tensors, {})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={_HEADER: json.dumps(rest)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())  # else a power failure can leave the new name with no content
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise MusterError(
            f"cannot write the checkpoint {path}",
            why=str(error),
            fix="check the free space and the permissions of that folder",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read_file(path: Path) -> Tree:
    """Read a tree, its tensors on the CPU; reject other kinds of files with a fix."""
    return joined(read_parts(path), path)


def read_parts(path: Path) -> FileParts:
    """Read the input of :func:`joined`."""
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
            why="it holds only tensors: no epoch and no optimizer state",
            fix="for weights only: safetensors.torch.load_model(model, path), before you pass "
            "the model to the trainer",
        )
    return FileParts(rest=rest, tensors=tensors)


def joined(parts: FileParts, path: Path) -> Tree:
    """Return the written tree; raise an error with ``path`` if a part is missing."""
    try:
        return _put_back(parts.rest, parts.tensors)
    except (KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> MusterError:
    return MusterError(
        f"the checkpoint {path} is damaged",
        why=f"{type(error).__name__}: {error}",
        fix="use an older checkpoint; this one cannot be repaired",
    )


def _refuse_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            beginning = file.read(9)
    except OSError as error:
        raise Impossible(
            f"cannot read a checkpoint at {path}", why=error.strerror or str(error)
        ) from None
    # safetensors starts with a length, which can be any bytes, and then a brace.
    if beginning[8:] != b"{" and beginning.startswith((b"PK", b"\x80")):  # torch.save, new and old
        raise Impossible(
            f"{path} was not read: it was written by torch.save (a pickle), not by save_checkpoint",
            why="loading a pickle can run arbitrary code",
            fix="if you trust it, convert it once: saved = torch.load(path, weights_only=True); "
            "load its parts into the model and the optimizer; then trainer.save_checkpoint(…)",
        )


def _take_out(
    tree: Tree,
    place: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    written: dict[tuple[Any, ...], str],
) -> Any:
    """Return the tree as JSON types; its tensors go to ``tensors``, shared ones only once."""
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
        f"{'/'.join(place)} cannot be saved in a checkpoint: it is a {type(tree).__name__}",
        why="a checkpoint holds tensors, numbers, strings, lists and dictionaries; nothing is "
        "pickled",
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


_SHOWN = 5  # differences named in an error; the rest is counted


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def model_state(model: nn.Module) -> Tree:
    """Return the model's tensors by its own names, without ``module.``."""
    return dict(unwrap_model(model).state_dict())


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tree:
    """Return the optimizer's state with names in place of torch's indices."""
    names = _checkpoint_file_names(optimizer, model)
    packed = optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
        "state": {names[number]: state for number, state in packed["state"].items()},
    }


def load_states(
    saved: Tree, model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path
) -> None:
    """Restore saved states. Reject states that do not match before changing anything."""
    _refuse_another_model(saved["model"], model, path)
    if optimizer is not None:
        packed = _packed(saved["optimizer"], optimizer, model, path)
        optimizer.load_state_dict(packed)
    unwrap_model(model).load_state_dict(saved["model"])


def _refuse_another_model(saved: Mapping[str, torch.Tensor], model: nn.Module, path: Path) -> None:
    own = unwrap_model(model).state_dict()
    differences = [
        *(f"missing in the file: {name}" for name in own.keys() - saved.keys()),
        *(f"not in the model: {name}" for name in saved.keys() - own.keys()),
        *(
            f"{name}: {tuple(saved[name].shape)} in the file, {tuple(own[name].shape)} in the model"
            for name in own.keys() & saved.keys()
            if saved[name].shape != own[name].shape
        ),
    ]
    if differences:
        shown = sorted(differences)[:_SHOWN]
        more = len(differences) - len(shown)
        raise Impossible(
            f"the checkpoint {path} does not match the model",
            why="\n".join([*shown, f"and {more} more"] if more else shown),
            fix="build the model with the settings used when the checkpoint was saved",
        )


def _packed(
    saved: Tree, optimizer: torch.optim.Optimizer, model: nn.Module, path: Path
) -> dict[str, Any]:
    """Return a saved state with this optimizer's indices; reject one of another optimizer."""
    names = _checkpoint_file_names(optimizer, model)
    own = [[names[n] for n in group["params"]] for group in optimizer.state_dict()["param_groups"]]
    difference = ""
    if saved["kind"] != type(optimizer).__name__:
        difference = f"it was saved by {saved['kind']}, but this is {type(optimizer).__name__}"
    elif own != [group["params"] for group in saved["groups"]]:
        difference = "its parameter groups differ from this optimizer's"
    if difference:
        raise Impossible(
            f"the optimizer state in {path} does not match this optimizer",
            why=difference,
            fix="create the optimizer with the class and parameter groups used when the checkpoint was "
            "saved",
        )
    numbers = {name: number for number, name in names.items()}
    return {
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in saved["groups"]
        ],
        "state": {numbers[name]: state for name, state in saved["state"].items()},
    }


def _checkpoint_file_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """Return the name of each of the optimizer's parameters, by torch's index."""
    by_parameter = {parameter: name for name, parameter in unwrap_model(model).named_parameters()}
    parameters: Iterable[Any] = (one for g in optimizer.param_groups for one in g["params"])
    try:
        return {number: by_parameter[one] for number, one in enumerate(parameters)}
    except KeyError:
        raise Impossible(
            "the optimizer has a parameter that is not in the trainer's model",
            why="optimizer state is saved under the parameter names of the model",
            fix="create the optimizer from trainer.model.parameters()",
        ) from None


T = TypeVar("T")


def save_together(path: Path, tree: Tree, world: World) -> None:
    """Write rank 0's tree; when this returns on any rank, the file is complete."""
    _by_first(lambda: write_parts(path, tree), world)


def load_together(path: Path, world: World) -> Tree:
    """Read the file on rank 0 and return its content on all ranks, tensors on the CPU."""
    parts = _by_first(lambda: read_parts(path), world)
    return joined(_shared(parts, world), path)


def _shared(parts: FileParts | None, world: World) -> FileParts:
    """Broadcast rank 0's parts: the JSON part first, then one tensor at a time."""
    outline = parts and {
        "rest": parts.rest,
        "tensors": [
            [name, str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in parts.tensors.items()
        ],
    }
    outline = all_gather_object(outline, world)[0]
    tensors = {}
    for name, kind, shape in outline["tensors"]:
        if parts is not None:
            tensor = parts.tensors[name].to(world.device)
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, kind), device=world.device)
        if world.world_size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, src=0)
        tensors[name] = tensor.cpu()
    return FileParts(rest=outline["rest"], tensors=tensors)


def _by_first(act: Callable[[], T], world: World) -> T | None:
    """Call a function on rank 0; raise its error on all ranks."""
    done, failure = None, None
    if world.is_first:
        try:
            done = act()
        except MusterError as error:
            failure = error
    told = all_gather_object(failure and [failure.what, failure.why, failure.fix], world)[0]
    if failure is not None:
        raise failure
    if told is not None:
        what, why, fix = told
        raise Impossible(what, why=why, fix=fix)
    return done
