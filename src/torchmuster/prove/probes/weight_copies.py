"""Find copies of a model's weights that a script keeps, such as an average of them (EMA), and hash them."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchmuster.prove.probes.fingerprints import local_tensor, tensors_hash


class WeightCopies:
    """The copies that were found last; they are not kept alive, as the script may replace them."""

    def __init__(self) -> None:
        self._copies: list[list[weakref.ref[torch.Tensor]]] = []

    def hashes(self, parameters: Sequence[torch.Tensor], *, search: bool) -> list[str]:
        """Return a hash for each copy; ``search`` for new ones, or if a known one is gone."""
        copies = []
        for references in self._copies:
            alive = []
            for reference in references:
                tensor = reference()
                if tensor is None:
                    search = True
                else:
                    alive.append(tensor)
            copies.append(alive)
        if search:
            copies = find_copies(parameters)
            self._copies = [list(map(weakref.ref, tensors)) for tensors in copies]
        return [tensors_hash(tensors) for tensors in copies]


def find_copies(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of each object that holds tensors of the same shapes as the parameters.

    Such objects are modules, and dictionaries and lists of tensors; the model itself is left out.
    """
    shapes = [parameter.shape for parameter in parameters]
    addresses = {local_tensor(parameter).data_ptr() for parameter in parameters}
    copies = []
    for thing in gc.get_objects():
        tensors = _tensors_of(thing, len(shapes))
        if not all(isinstance(tensor, torch.Tensor) and not tensor.is_meta for tensor in tensors):
            continue
        if not tensors or [tensor.shape for tensor in tensors] != shapes:
            continue
        if addresses.isdisjoint(local_tensor(tensor).data_ptr() for tensor in tensors):
            copies.append(tensors)
    return copies


def _tensors_of(thing: Any, count: int) -> list[Any]:
    """Return what a module, a dictionary or a list holds, if it is so many things."""
    kind = type(thing)
    if kind is dict and len(thing) == count:
        return list(thing.values())
    if kind is list and len(thing) == count:
        return list(thing)
    if issubclass(kind, nn.Module):
        return list(thing.parameters())
    return []
