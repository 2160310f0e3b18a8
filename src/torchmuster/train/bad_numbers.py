"""Find the source of a NaN or Inf: all ranks skip the step and report rank, batch and layer.

Detecting a bad step costs nothing: the strategies agree on it before weights change, see
:class:`torchmuster.train.step.TrainStep`. Only then do all ranks look for the cause: they compute
the step's micro-batches again with hooks on every layer::

    outcome = update.apply()
    if not outcome.applied and not outcome.overflowed:
        finding = bad_numbers.examine(number, update.micro_batches, loss_fn)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.buffers import untrained
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.models.parameters import own_name
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.world import World, all_gather_object


def worst(tensor: torch.Tensor) -> str | None:
    """Return ``NaN``, ``Inf`` or ``-Inf`` if the tensor (or this rank's shard) has one, else None."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    if not (own.is_floating_point() or own.is_complex()) or bool(torch.isfinite(own).all()):
        return None
    if bool(torch.isnan(own).any()):
        return "NaN"
    return "-Inf" if own.is_floating_point() and not bool(torch.isposinf(own).any()) else "Inf"


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path or "the tensor", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors_of(one, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from tensors_of(one, f"{path}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from tensors_of(getattr(value, one.name), f"{path}.{one.name}")


def bad_rows(batch: Any) -> dict[str, Any] | None:
    """Return the first non-finite tensor of a batch: its path, the kind, and which rows."""
    for place, tensor in tensors_of(batch, "batch"):
        if (kind := worst(tensor)) is not None:
            bad = ~torch.isfinite(tensor)
            rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten() if bad.dim() else bad
            return {"what": place, "kind": kind, "rows": rows.tolist() if bad.dim() else [0]}
    return None


class _NanHooks:
    """Install hooks on every module for the duration of the ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.culprit: dict[str, str] | None = None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


class ForwardNanHooks(_NanHooks):
    """Records the first layer with non-finite output and finite inputs.

    A -Inf counts only if no NaN or Inf follows: masks often contain -Inf.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._masks: dict[str, str] | None = None

    def __enter__(self) -> "ForwardNanHooks":
        for name, module in self._model.named_modules():
            # A module's hook runs after those of its submodules: the innermost is first.
            self._handles.append(module.register_forward_hook(self._hook(own_name(name))))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.culprit = self.culprit or self._masks

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if self.culprit is not None:
                return
            for _, tensor in tensors_of(output):
                kind = worst(tensor)
                found = {"what": name or type(module).__name__, "kind": kind or ""}
                if kind == "-Inf":
                    self._masks = self._masks or found
                elif kind is not None:
                    self.culprit = found

        return look


class BackwardNanHooks(_NanHooks):
    """Records the first non-finite gradient, in backward order."""

    def __enter__(self) -> "BackwardNanHooks":
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
            for _, tensor in tensors_of(output):
                self._watch(tensor, f"the output of {name}")

        return watch

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        def look(gradient: torch.Tensor) -> None:
            if self.culprit is None and (kind := worst(gradient)) is not None:
                self.culprit = {"what": name, "kind": kind}

        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(look))  # type: ignore[no-untyped-call]


_SKIPPED = "all ranks skipped this step"
_SHOWN = 8  # indices of samples, at most

# What one rank found. The first of these kinds that any rank found is the root cause: the
# later ones follow from it.
_CAUSES = ("weights", "input", "layer", "loss", "gradient")

_FIXES = {
    "weights": "resume from an earlier checkpoint with a lower learning rate or gradient clipping",
    "input": "clean or remove these samples",
    "layer": "look for a division, logarithm, root or exponential there; lower the learning rate, clip "
    "gradients, or compute this layer in fp32",
    "loss": "look for a logarithm of 0 or a division by a count of 0 in the loss function",
    "gradient": "look for a root or norm at 0, or a division, at this point of the forward pass "
    "or just after it; "
    "add a small epsilon there",
}
_NOT_AGAIN = (
    "lower the learning rate or clip gradients if it recurs; if it is always the same rank, "
    "test its device: muster doctor"
)


class BadNumbers:
    """Finds the cause of a bad step, and raises after too many in a row."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        precision: Precision = FP32,
        most_in_a_row: int = 10,
    ) -> None:
        self._model = model
        self._world = world
        self._precision = precision
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0
        self._last_bad: int | None = None

    def examine(
        self,
        step_number: int,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Callable[[nn.Module, Any], Any],
        *,
        epoch: int | None = None,
    ) -> Finding:
        """Find the cause of a step that was not applied; the same finding on every rank.

        Raises it on all ranks when the run must stop. Restores weights, buffers and torch's random
        state, and clears the gradients.
        """
        follows = self._last_bad is not None and step_number == self._last_bad + 1
        self._in_a_row = self._in_a_row + 1 if follows else 1
        self._last_bad = step_number
        seen = self._look(micro_batches, loss_fn)
        of_ranks = all_gather_object(seen, self._world)
        where = f"step {step_number}" if epoch is None else f"step {step_number} of epoch {epoch}"
        stops = self._in_a_row >= self._most_in_a_row
        found = self._verdict(where, of_ranks, "all ranks stop" if stops else _SKIPPED)
        if stops:
            raise MusterError(found.what, why=found.why, fix=found.fix)
        return found

    def _look(
        self, micro_batches: Sequence[MicroBatch], loss_fn: Callable[[nn.Module, Any], Any]
    ) -> dict[str, Any]:
        """Return what this rank found, as plain JSON types (a collective)."""
        seen: dict[str, Any] = {"buffers": _bad_names(self._model.named_buffers())}
        if bad := _bad_names(self._model.named_parameters()):
            seen["weights"] = {"what": bad[0], "more": len(bad) - 1}
        with _as_it_was(self._model, self._world.device):
            for micro in micro_batches:
                with torch.no_grad(), ForwardNanHooks(self._model) as forward:
                    loss = self._total(loss_fn, micro)
                if "loss" in seen or (kind := worst(loss)) is None:
                    continue
                seen["loss"] = {"kind": kind, "samples": _samples(micro)}
                if forward.culprit is not None:
                    seen["layer"] = {**forward.culprit, "samples": _samples(micro)}
                _look_at_input(micro, seen)
            # Only if all ranks' losses are finite: all ranks must take part in a backward.
            if not any("loss" in one for one in all_gather_object(seen, self._world)):
                for micro in micro_batches:
                    with BackwardNanHooks(self._model) as backward:
                        self._total(loss_fn, micro).backward()  # type: ignore[no-untyped-call]
                    if "gradient" not in seen and backward.culprit is not None:
                        seen["gradient"] = {**backward.culprit, "samples": _samples(micro)}
                        _look_at_input(micro, seen)
        return seen

    def _total(self, loss_fn: Callable[[nn.Module, Any], Any], micro: MicroBatch) -> torch.Tensor:
        with self._precision.autocast(self._world.device):
            loss = loss_fn(self._model, micro.batch)
        total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
        return total

    def _verdict(self, where: str, of_ranks: list[dict[str, Any]], end: str) -> Finding:
        cause = next((one for one in _CAUSES if any(one in seen for seen in of_ranks)), None)
        ranks = [rank for rank, seen in enumerate(of_ranks) if cause in seen]
        if cause is None:
            what = (
                f"{where}: a gradient was not finite, but all values are finite when recomputed; "
                f"{end}"
            )
            why = "different random numbers (dropout), values near overflow, or a faulty device"
        else:
            seen = of_ranks[ranks[0]][cause]
            what = f"{where}: {_bad_numbers_message(cause, ranks[0], seen)}; {end}"
            why = _where_from(ranks, seen)
        also = [why] if why else []
        if self._in_a_row > 1:
            also.append(f"{self._in_a_row} bad steps in a row")
        if buffers := next((seen["buffers"] for seen in of_ranks if seen["buffers"]), None):
            also.append(
                f"the buffer {buffers[0]} is not finite either: it keeps the bad values "
                "until it is reset"
            )
        return Finding(
            name="bad-numbers",
            status=Status.WARNING,
            what=what,
            why="; ".join(also),
            fix=_NOT_AGAIN if cause is None else _FIXES[cause],
        )


def _bad_numbers_message(cause: str, rank: int, seen: dict[str, Any]) -> str:
    kind, what = seen.get("kind", ""), seen.get("what", "")
    return {
        "weights": f"the weights are already not finite: {what} on rank {rank}"
        + (f" and {seen.get('more')} more" if seen.get("more") else ""),
        "input": f"rank {rank}'s input batch has {kind} ({what})",
        "layer": f"rank {rank}'s layer {what} returned {kind} for finite inputs",
        "loss": f"rank {rank}'s loss function returned {kind} for finite outputs of all layers",
        "gradient": f"rank {rank}'s backward pass produced {kind}, first in the gradient of {what}",
    }[cause]


def _where_from(ranks: list[int], seen: dict[str, Any]) -> str:
    parts = []
    if samples := seen.get("samples"):
        more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
        word = "sample" if len(samples) == 1 else "samples"
        parts.append(f"{word} {', '.join(map(str, samples[:_SHOWN]))}{more} of the dataset")
    if len(ranks) > 1:
        parts.append(f"the same on ranks {', '.join(map(str, ranks[1:]))}")
    return "; ".join(parts)


def _look_at_input(micro: MicroBatch, seen: dict[str, Any]) -> None:
    """Check a batch that led to a bad step; in other batches -Inf may be intended, as in masks."""
    if (rows := bad_rows(micro.batch)) is not None:
        seen["input"] = {**rows, "samples": _samples(micro, rows["rows"])}


def _samples(micro: MicroBatch, rows: Sequence[int] | None = None) -> list[int]:
    """Return the dataset indices of a batch's rows; empty if unknown."""
    indices = list(micro.indices)
    if rows is None:
        return indices
    return [indices[row] for row in rows if row < len(indices)]


def _bad_names(named: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    return [own_name(name) for name, tensor in named if worst(tensor) is not None]


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore untrained tensors and torch's random state, and clear the gradients."""
    kept = [(one, one.detach().clone()) for one in untrained(model)]
    accelerators = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(
            accelerators, device_type="cuda" if device.type == "cpu" else device.type
        ):
            yield
    finally:
        with torch.no_grad():
            for one, before in kept:
                one.copy_(before)
        model.zero_grad(set_to_none=True)
