"""Find the source of a NaN or Inf: all ranks skip the step and report rank, batch and layer.

Detecting a bad step costs nothing: the strategies agree on it before weights change, see
:class:`torchmuster.train.step.TrainStep`. Only then do all ranks look for the cause: they compute
the step's micro-batches again with hooks on every layer::

    outcome = update.apply()
    if not outcome.applied and not outcome.overflowed:
        finding = bad_numbers.examine(number, outcome.micro_batches, loss_fn)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.buffers import no_effect
from torchmuster.train.data.pytree import named_tensors
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.models.parameters import own_name
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.world import World, all_gather_object

SHOWN = 8  # indices of samples, at most
# What a rank may find, with the fix. The first of these that any rank finds is the root cause: the
# later ones follow from it.
FIXES = {
    "weights": "resume from an earlier checkpoint with a lower learning rate or gradient clipping",
    "input": "clean or remove these samples",
    "layer": "look for a division, logarithm, root or exponential there; lower the learning rate, clip "
    "gradients, or compute this layer in fp32",
    "loss": "look for a logarithm of 0 or a division by a count of 0 in the loss function",
    "gradient": "look for a root or norm at 0, or a division, at this point of the forward pass "
    "or just after it; add a small epsilon there",
}
MESSAGES = {
    "weights": "the weights are already not finite: {what} on rank {rank}",
    "input": "rank {rank}'s input batch has {kind} ({what})",
    "layer": "rank {rank}'s layer {what} returned {kind} for finite inputs",
    "loss": "rank {rank}'s loss function returned {kind} for finite outputs of all layers",
    "gradient": "rank {rank}'s backward pass produced {kind}, first in the gradient of {what}",
}
NOT_AGAIN = (
    "lower the learning rate or clip gradients if it recurs; if it is always the same rank, "
    "test its device: muster doctor"
)

LossFunction = Callable[[nn.Module, Any], Any]


def worst(tensor: torch.Tensor) -> str | None:
    """Return ``NaN``, ``Inf`` or ``-Inf`` if the tensor (or this rank's shard) has one, else None."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    if bool(own.isfinite().all()):
        return None
    if bool(own.isnan().any()):
        return "NaN"
    return "-Inf" if not own.is_complex() and not bool(own.isposinf().any()) else "Inf"


class NanHooks:
    """Watches a model inside a ``with``: ``layer`` and ``gradient`` are the first that were not finite.

    A layer's -Inf counts only if no NaN or Inf follows, because masks often contain -Inf.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._mask: dict[str, str] | None = None
        self._layer: dict[str, str] | None = None
        self.gradient: dict[str, str] | None = None

    @property
    def layer(self) -> dict[str, str] | None:
        """The first layer with non-finite output and finite inputs."""
        return self._layer or self._mask

    def __enter__(self) -> "NanHooks":
        for name, module in self._model.named_modules():
            # A module's hook runs after those of its submodules: the innermost is first.
            name = own_name(name) or type(module).__name__
            self._handles.append(module.register_forward_pre_hook(self._before(name)))
            self._handles.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Any:
        def watch_parameters(module: nn.Module, _: Any) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                self._watch(parameter, f"the parameter {name}.{own}")

        return watch_parameters

    def _after(self, name: str) -> Any:
        def check_output(module: nn.Module, _: Any, output: Any) -> None:
            for _, tensor in named_tensors(output):
                self._watch(tensor, f"the output of {name}")
                if self._layer is not None:
                    continue
                kind = worst(tensor)
                if kind == "-Inf":
                    self._mask = self._mask or {"what": name, "kind": kind}
                elif kind is not None:
                    self._layer = {"what": name, "kind": kind}

        return check_output

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        def check_gradient(gradient: torch.Tensor) -> None:
            kind = None if self.gradient is not None else worst(gradient)
            if kind is not None:
                self.gradient = {"what": name, "kind": kind}

        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(check_gradient))  # type: ignore[no-untyped-call]


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
        loss_fn: LossFunction,
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
        of_ranks = all_gather_object(self._causes(micro_batches, loss_fn), self._world)
        where = f"step {step_number}" if epoch is None else f"step {step_number} of epoch {epoch}"
        finding = self._finding(where, of_ranks)
        if self._in_a_row >= self._most_in_a_row:
            raise MusterError(finding.what, why=finding.why, fix=finding.fix)
        return finding

    def _causes(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction) -> dict[str, Any]:
        """Return what this rank found, by the keys of ``FIXES``, as plain JSON types (a collective)."""
        causes: dict[str, Any] = {"buffers": bad_names(self._model.named_buffers())}
        weights = bad_names(self._model.named_parameters())
        if weights:
            causes["weights"] = {"what": weights[0]}
        with no_effect(self._model, self._world):
            for micro in micro_batches:
                with torch.no_grad(), NanHooks(self._model) as hooks:
                    loss = self._total(loss_fn, micro)
                kind = worst(loss)
                if kind is not None and "loss" not in causes:
                    causes["loss"] = {"kind": kind, "samples": list(micro.indices)}
                    if hooks.layer is not None:
                        causes["layer"] = {**hooks.layer, "samples": list(micro.indices)}
                    causes |= bad_input(micro)
            # Only if all ranks' losses are finite: all ranks must take part in a backward.
            if not any("loss" in other for other in all_gather_object(causes, self._world)):
                for micro in micro_batches:
                    with NanHooks(self._model) as hooks:
                        self._total(loss_fn, micro).backward()  # type: ignore[no-untyped-call]
                    if hooks.gradient is not None and "gradient" not in causes:
                        causes["gradient"] = {**hooks.gradient, "samples": list(micro.indices)}
                        causes |= bad_input(micro)
        return causes

    def _total(self, loss_fn: LossFunction, micro: MicroBatch) -> torch.Tensor:
        with self._precision.autocast(self._world.device):
            loss = loss_fn(self._model, micro.batch)
        total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
        return total

    def _finding(self, where: str, of_ranks: list[dict[str, Any]]) -> Finding:
        what = "a gradient was not finite, but all values are finite when recomputed"
        notes = ["different random numbers (dropout), values near overflow, or a faulty device"]
        fix = NOT_AGAIN
        for cause in FIXES:
            ranks = [rank for rank, causes in enumerate(of_ranks) if cause in causes]
            if not ranks:
                continue
            first = of_ranks[ranks[0]][cause]
            what = MESSAGES[cause].format(rank=ranks[0], **first)
            notes = []
            samples = first.get("samples")
            if samples:
                more = ", …" if len(samples) > SHOWN else ""
                shown = ", ".join(map(str, samples[:SHOWN]))
                notes.append(f"samples of the dataset: {shown}{more}")
            if len(ranks) > 1:
                notes.append(f"the same on ranks {', '.join(map(str, ranks[1:]))}")
            fix = FIXES[cause]
            break
        if self._in_a_row > 1:
            notes.append(f"{self._in_a_row} bad steps in a row")
        for causes in of_ranks:
            if causes["buffers"]:
                notes.append(
                    f"the buffer {causes['buffers'][0]} is not finite either: it keeps the bad values "
                    "until it is reset"
                )
                break
        end = "all ranks skipped this step"
        if self._in_a_row >= self._most_in_a_row:
            end = "all ranks stop"
        return Finding(
            name="bad-numbers",
            status=Status.WARNING,
            what=f"{where}: {what}; {end}",
            why="; ".join(notes),
            fix=fix,
        )


def bad_input(micro: MicroBatch) -> dict[str, Any]:
    """Return the first non-finite tensor of a batch that led to a bad step, as the cause "input".

    In other batches -Inf may be intended, as in masks.
    """
    for name, tensor in named_tensors(micro.batch, "batch"):
        kind = worst(tensor)
        if kind is not None:
            bad = tensor.isfinite().logical_not()
            rows = sorted(set(bad.nonzero()[:, 0].tolist())) if tensor.dim() else []
            samples = [micro.indices[row] for row in rows if row < len(micro.indices)]
            return {"input": {"what": name, "kind": kind, "samples": samples}}
    return {}


def bad_names(named: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors that are not finite."""
    return [own_name(name) for name, tensor in named if worst(tensor) is not None]
