"""A forward or backward in which every layer is watched: the first one that gives NaN or Inf is kept.

The hooks see a rank's own numbers, before ranks mix theirs: weights of shards are watched while they are
whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchmuster.train.names import own_name


def worst(tensor: torch.Tensor) -> str | None:
    """Return ``NaN``, ``Inf`` or ``-Inf`` if the tensor (or this rank's shard) has one, else None."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    if not (own.is_floating_point() or own.is_complex()) or bool(torch.isfinite(own).all()):
        return None
    if bool(torch.isnan(own).any()):
        return "NaN"
    return "-Inf" if own.is_floating_point() and not bool(torch.isposinf(own).any()) else "Inf"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, each with its place."""
    if isinstance(value, torch.Tensor):
        yield path or "the tensor", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors_in(one, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from tensors_in(one, f"{path}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from tensors_in(getattr(value, one.name), f"{path}.{one.name}")


def bad_rows(batch: Any) -> dict[str, Any] | None:
    """Return the first tensor of a batch that is not finite: its place, the kind, and which rows."""
    for place, tensor in tensors_in(batch, "batch"):
        if (kind := worst(tensor)) is not None:
            bad = ~torch.isfinite(tensor)
            rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten() if bad.dim() else bad
            return {"what": place, "kind": kind, "rows": rows.tolist() if bad.dim() else [0]}
    return None


class _Watched:
    """Hooks on every module while the ``with`` lasts."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.culprit: dict[str, str] | None = None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


class WatchedForward(_Watched):
    """Keeps the first layer whose output is bad though all before it were fine.

    A -Inf counts only if nothing worse comes: masks are often made of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._masks: dict[str, str] | None = None

    def __enter__(self) -> "WatchedForward":
        for name, module in self._model.named_modules():
            # A module's hook comes after those of the modules inside it: the innermost is first.
            self._handles.append(module.register_forward_hook(self._hook(own_name(name))))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.culprit = self.culprit or self._masks

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if self.culprit is not None:
                return
            for _, tensor in tensors_in(output):
                kind = worst(tensor)
                found = {"what": name or type(module).__name__, "kind": kind or ""}
                if kind == "-Inf":
                    self._masks = self._masks or found
                elif kind is not None:
                    self.culprit = found

        return look


class WatchedBackward(_Watched):
    """Keeps the first gradient that is bad, in the order of the backward."""

    def __enter__(self) -> "WatchedBackward":
        for name, module in self._model.named_modules():
            own = own_name(name) or type(module).__name__
            self._handles.append(module.register_forward_pre_hook(self._parameters_hook(own)))
            self._handles.append(module.register_forward_hook(self._output_hook(own)))
        return self

    def _parameters_hook(self, name: str) -> Any:
        def watch(module: nn.Module, _: Any) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                self._watch(parameter, f"the parameter {name}.{own}")

        return watch

    def _output_hook(self, name: str) -> Any:
        def watch(module: nn.Module, _: Any, output: Any) -> None:
            for _, tensor in tensors_in(output):
                self._watch(tensor, f"the output of {name}")

        return watch

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        def look(gradient: torch.Tensor) -> None:
            if self.culprit is None and (kind := worst(gradient)) is not None:
                self.culprit = {"what": name, "kind": kind}

        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(look))  # type: ignore[no-untyped-call]
