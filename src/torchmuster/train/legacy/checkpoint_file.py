"""One checkpoint file for all ranks: rank 0 writes it with ``torch.save``, every rank reads it.

Files are read with ``weights_only``, which runs no code from them.
"""

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.errors import MusterError
from torchmuster.train.world import World, all_gather_object


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the model's tensors by its own names, and the optimizer's state."""
    return {"model": unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}


def save_together(path: Path, content: Mapping[str, Any], world: World) -> None:
    """Write rank 0's content; when this returns on any rank, the file is complete.

    If rank 0 fails for any reason, all ranks raise.
    """
    problem = ""
    if world.is_first:
        try:
            write_file(path, content)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problem = all_gather_object(problem, world)[0]
    if problem:
        raise MusterError(
            f"cannot write the checkpoint {path}",
            why=problem,
            fix="check the free space and the permissions of that folder",
        )


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
    finally:
        if partial.exists():
            partial.unlink()


def read_file(path: Path) -> dict[str, Any]:
    """Return what a file of :func:`write_file` holds, tensors on the CPU; raise for any other file."""
    saved = None
    why = "it has no epoch, model and optimizer"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MusterError(f"cannot read a checkpoint at {path}", why=str(error)) from None
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
    """Restore saved states of the same model and optimizer."""
    try:
        unwrap_model(model).load_state_dict(saved["model"])
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise MusterError(
            f"the checkpoint {path} does not match the model or the optimizer",
            why=str(error),
            fix="build both with the settings used when the checkpoint was saved",
        ) from None
