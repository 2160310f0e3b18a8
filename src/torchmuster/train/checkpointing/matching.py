"""Compare a checkpoint with the training state that it is to be loaded into, before anything is changed."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchmuster.checkpoints.base_model import refuse_other_base
from torchmuster.checkpoints.manifest import Manifest
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.checkpointing.state_tree import flatten

_SHOWN = 5  # differences named in an error; the rest is counted
_OPTIMIZER = "optimizer.state."
# Options that differ between parameter groups and over time.
_CHANGING_OPTIONS = ("params", "lr", "initial_lr", "weight_decay")


def tensors_to_load(
    manifest: Manifest,
    stored: Mapping[str, Any],
    state: Mapping[str, Any],
    optional: Collection[str],
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state`` that a checkpoint has; raise if it does not match.

    ``stored`` is DCP's description of each stored tensor. A checkpoint that names its base model
    may lack the tensors in ``optional``.
    """
    here, tensors = flatten(state)
    saved = dict(stored) | {name: stored.get(first) for name, first in manifest.tied.items()}
    try:
        never = never_stepped(manifest.state, here)
        refuse_other_base(manifest.name, manifest.state.get("base"), here.get("base"))
        has_base = manifest.state.get("base") is not None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MusterError(
            f"{manifest.name} is not the checkpoint of a training",
            why=f"{type(error).__name__}: {error}",
            fix="use another folder for checkpoints",
        ) from None
    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(never) and not (has_base and name in optional and name not in saved)
    }
    differences = _differences(saved, wanted)
    if differences:
        shown = differences[:_SHOWN]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        raise Impossible(
            f"the checkpoint {manifest.name} does not match this run: its tensors differ",
            why="\n".join(shown),
            fix="use the model and the optimizer that it was saved with, or start a new run",
        )
    return wanted


def never_stepped(saved: Any, wanted: Any) -> tuple[str, ...]:
    """Return the name prefixes missing in a checkpoint because a parameter never had a gradient.

    ``saved`` and ``wanted`` are states without their tensors. An optimizer has no state for such a
    parameter until its first step. If it has no state at all, it may also be a different kind of
    optimizer, such as SGD without momentum.
    """
    before, here = saved.get("optimizer"), wanted.get("optimizer")
    if before is None or here is None:
        return ()
    if not before["state"] and _options(before) != _options(here):
        return ()
    names = [name for group in before["param_groups"] for name in group["params"]]
    return tuple(f"{_OPTIMIZER}{name}." for name in names if name not in before["state"])


def _options(optimizer: Any) -> dict[str, Any]:
    options = {}
    for group in optimizer["param_groups"]:
        options.update(group)
    return {name: value for name, value in options.items() if name not in _CHANGING_OPTIONS}


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Describe missing and extra tensors, and those of another shape or dtype."""
    differences = []
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in wanted:
            differences.append(f"{name} is in the checkpoint but not in this run")
        elif saved.get(name) is None:
            differences.append(f"{name} is not in the checkpoint")
        else:
            tensor, stored = wanted[name], saved[name]
            before_and_here = (
                (list(stored.size), list(tensor.shape)),
                (stored.properties.dtype, tensor.dtype),
            )
            for value, own in before_and_here:
                if value != own:
                    differences.append(f"{name} is {value} in the checkpoint, {own} here")
    return differences
