"""One checkpoint file for all ranks: ``torch.save`` on rank 0; it reads it too, and the others receive it.

``save_together`` and ``load_together`` are collectives. Only rank 0 needs to see the file, so hosts
need no shared disk, and all ranks have the same state afterwards. An error on rank 0 is raised on
every rank. Files are read with ``weights_only``, which runs no code from them.
"""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.world import World, all_gather_object

_SHOWN = 5  # differences named in an error; the rest is counted
T = TypeVar("T")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by its own names, without ``module.``."""
    return dict(unwrap_model(model).state_dict())


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, with its class."""
    return {"kind": type(optimizer).__name__, **optimizer.state_dict()}


def save_together(path: Path, content: Mapping[str, Any], world: World) -> None:
    """Write rank 0's content; when this returns on any rank, the file is complete."""
    _by_first(lambda: write_file(path, content), world)


def load_together(path: Path, world: World) -> dict[str, Any]:
    """Read the file on rank 0 and return its content on all ranks, tensors on the CPU."""
    content = _by_first(lambda: _checked(path), world) or b""
    size = all_gather_object(len(content), world)[0]
    if world.world_size > 1:
        received = torch.empty(size, dtype=torch.uint8)
        if world.is_first:
            received = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        received = received.to(world.device)
        dist.broadcast(received, src=0)
        content = bytes(received.cpu().untyped_storage())
    return parse(content, path)


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file; it is complete or, after any failure, unchanged."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())  # else a power failure can leave the new name with no content
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        raise MusterError(
            f"cannot write the checkpoint {path}",
            why=str(error),
            fix="check the free space and the permissions of that folder",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def parse(content: bytes, path: Path) -> dict[str, Any]:
    """Return what a file of :func:`write_file` holds; raise an error for any other file."""
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        raise MusterError(
            f"the checkpoint {path} is damaged, or was not written by save_checkpoint",
            why=f"torch.load with weights_only=True refuses it ({type(error).__name__})",
            fix="use an older checkpoint; nothing was loaded, and no code of the file was run",
        ) from error
    if not isinstance(saved, dict) or not {"epoch", "model", "optimizer"} <= saved.keys():
        raise Impossible(
            f"{path} is not a checkpoint of a trainer",
            why="it has no epoch, model and optimizer",
            fix="for weights only: model.load_state_dict(torch.load(path, weights_only=True)), before "
            "you pass the model to the trainer",
        )
    return saved


def load_states(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path
) -> None:
    """Restore saved states. Reject states that do not match before changing anything."""
    _refuse_another_model(saved["model"], model, path)
    if optimizer is not None:
        state = dict(saved["optimizer"])
        kind = state.pop("kind")
        try:
            if kind != type(optimizer).__name__:
                raise ValueError(f"it was saved by {kind}, but this is {type(optimizer).__name__}")
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise Impossible(
                f"the optimizer state in {path} does not match this optimizer",
                why=str(error),
                fix="create the optimizer with the class and parameter groups used when the checkpoint "
                "was saved",
            ) from None
    unwrap_model(model).load_state_dict(saved["model"])


def _refuse_another_model(saved: Mapping[str, torch.Tensor], model: nn.Module, path: Path) -> None:
    own = unwrap_model(model).state_dict()
    differences = [f"missing in the file: {name}" for name in own.keys() - saved.keys()]
    differences += [f"not in the model: {name}" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        before, here = tuple(saved[name].shape), tuple(own[name].shape)
        if before != here:
            differences.append(f"{name}: {before} in the file, {here} in the model")
    if differences:
        shown = sorted(differences)[:_SHOWN]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        raise Impossible(
            f"the checkpoint {path} does not match the model",
            why="\n".join(shown),
            fix="build the model with the settings used when the checkpoint was saved",
        )


def _checked(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Impossible(
            f"cannot read a checkpoint at {path}", why=error.strerror or str(error)
        ) from None
    parse(content, path)
    return content


def _by_first(act: Callable[[], T], world: World) -> T | None:
    """Call a function on rank 0; raise its error on all ranks."""
    result, failure = None, None
    if world.is_first:
        try:
            result = act()
        except MusterError as error:
            failure = error
    first = all_gather_object(failure and [failure.what, failure.why, failure.fix], world)[0]
    if failure is not None:
        raise failure
    if first is not None:
        what, why, fix = first
        raise Impossible(what, why=why, fix=fix)
    return result
