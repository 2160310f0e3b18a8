"""One checkpoint file for all ranks: rank 0 writes it with ``torch.save``, reads it, and sends it to the others.

``save_together`` and ``load_together`` are collectives. Only rank 0 needs to see the file, so hosts
need no shared disk. An error on rank 0 is raised on every rank. Files are read with
``weights_only``, which runs no code from them.
"""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.errors import MusterError
from torchmuster.train.world import World, all_gather_object


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the model's tensors by its own names, and the optimizer's state with its class."""
    state = {"kind": type(optimizer).__name__, **optimizer.state_dict()}
    return {"model": unwrap_model(model).state_dict(), "optimizer": state}


def save_together(path: Path, content: Mapping[str, Any], world: World) -> None:
    """Write rank 0's content; when this returns on any rank, the file is complete."""

    def write() -> bytes:
        write_file(path, content)
        return b""

    by_first(write, world)


def load_together(path: Path, world: World) -> dict[str, Any]:
    """Read the file on rank 0 and return its content on all ranks, tensors on the CPU."""
    return parse(by_first(lambda: read_file(path), world), path)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file that :func:`parse` accepts."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MusterError(f"cannot read a checkpoint at {path}", why=str(error)) from None
    parse(content, path)
    return content


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
    saved = None
    why = "it has no epoch, model and optimizer"
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        why = f"torch.load with weights_only=True refuses it ({type(error).__name__})"
    if not isinstance(saved, dict) or not {"epoch", "model", "optimizer"} <= saved.keys():
        raise MusterError(
            f"the checkpoint {path} is damaged, or was not written by save_checkpoint",
            why=why,
            fix="use an older checkpoint; nothing was loaded, and no code of the file was run",
        )
    return saved


def load_states(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path
) -> None:
    """Restore saved states; those that do not match are refused before anything changes."""
    model = unwrap_model(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved["model"].items()}
    different = []
    for name in sorted(shapes.keys() | saved_shapes.keys()):
        saved_shape, shape = saved_shapes.get(name), shapes.get(name)
        if saved_shape != shape:
            different.append(f"{name}: {saved_shape} in the file, {shape} in the model")
    state = dict(saved["optimizer"])
    kind = state.pop("kind")
    try:
        if different:
            raise ValueError("\n".join(different[:5]))
        if optimizer is not None:
            if kind != type(optimizer).__name__:
                raise ValueError(f"its optimizer is {kind}, and this is {type(optimizer).__name__}")
            optimizer.load_state_dict(state)
    except ValueError as error:
        raise MusterError(
            f"the checkpoint {path} does not match the model or the optimizer",
            why=str(error),
            fix="build both with the settings used when the checkpoint was saved",
        ) from None
    model.load_state_dict(saved["model"])


def by_first(act: Callable[[], bytes], world: World) -> bytes:
    """Return what rank 0's call returns, on all ranks; raise its error on all ranks."""
    content, failure = b"", None
    if world.is_first:
        try:
            content = act()
        except MusterError as error:
            failure = [error.what, error.why, error.fix]
    size, failure = all_gather_object([len(content), failure], world)[0]
    if failure is not None:
        what, why, fix = failure
        raise MusterError(what, why=why, fix=fix)
    if size and world.world_size > 1:
        received = torch.empty(size, dtype=torch.uint8)
        if world.is_first:
            received = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        received = received.to(world.device)
        dist.broadcast(received, src=0)
        content = bytes(received.cpu().untyped_storage())
    return content
