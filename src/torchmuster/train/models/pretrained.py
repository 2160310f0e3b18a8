"""Weights from safetensors files into a deferred model: each rank reads only the parts it keeps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.models.deferred import Part, take_values_from


def load_shards(
    model: nn.Module,
    files: Iterable[Path],
    *,
    name_in_files: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Let ``materialise`` read the model's weights from these files.

    ``name_in_files`` gives the name that a weight of the model has in the files, or None for one that they are
    not expected to have. Names and shapes are compared here, before anything is read.
    """
    stored = _stored(files)
    tensors = model.state_dict(keep_vars=True)
    found = {name: other for name in tensors if (other := name_in_files(name)) is not None}
    _compare({other: tensors[name] for name, other in found.items()}, stored)
    take_values_from(
        model, {name: stored[other] for name, other in found.items() if other in stored}
    )


@dataclass(frozen=True, slots=True)
class _FromFile:
    name: str
    path: Path
    shape: tuple[int, ...]
    opened: Any  # safetensors' handle; the file is mapped into memory, not read

    def values(self, part: Part, *, device: torch.device, seed: int) -> torch.Tensor:
        values: torch.Tensor
        if not part:
            values = self.opened.get_tensor(self.name)
            return values
        view = self.opened.get_slice(self.name)
        if any(
            one.start >= one.stop for one in part
        ):  # a rank without a share; not readable as such
            return torch.empty([one.stop - one.start for one in part])
        values = view[part]
        return values


def _stored(files: Iterable[Path]) -> dict[str, _FromFile]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, _FromFile] = {}
    for path in files:
        try:
            opened: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise Impossible(
                f"the weights in {path} cannot be read",
                why=str(error),
                fix="check that the file is there, whole and a safetensors file",
            ) from error
        for name in opened.keys():  # noqa: SIM118  it is not a dictionary
            shape = tuple(opened.get_slice(name).get_shape())
            found[name] = _FromFile(name=name, path=path, shape=shape, opened=opened)
    return found


def _compare(wanted: dict[str, torch.Tensor], stored: dict[str, _FromFile]) -> None:
    """Refuse weights that do not belong to the model, with all that is wrong at once."""
    present = {id(tensor) for name, tensor in wanted.items() if name in stored}
    # One that is tied to a weight of the files need not be there under its other name.
    missing = [
        name for name, tensor in wanted.items() if name not in stored and id(tensor) not in present
    ]
    unexpected = [name for name in stored if name not in wanted]
    unequal = [
        f"{name}: {list(stored[name].shape)} in the files, {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    lines = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("not in the files", missing),
            ("not in the model", unexpected),
            ("of another shape", unequal),
        )
        if names
    ]
    if lines:
        raise Impossible(
            "these weights are not those of this model",
            why="\n".join(lines),
            fix="take the files that were saved from this model, or build the model that they were saved from",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
