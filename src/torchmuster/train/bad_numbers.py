"""Find the source of a NaN or Inf: all ranks skip the step and report rank, batch and layer.

Detecting a bad step costs nothing: the strategies agree on it before weights change, see
:class:`torchmuster.train.step.TrainStep`. Only then do all ranks look for the cause: they compute
the step's micro-batches again with hooks on every layer::

    outcome = update.apply()
    if not outcome.applied and not outcome.overflowed:
        finding = bad_numbers.examine(number, outcome.micro_batches, loss_fn)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
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
}
MESSAGES = {
    "weights": "the weights are already not finite: {what} on rank {rank}",
    "input": "rank {rank}'s input batch has {kind} ({what})",
    "layer": "rank {rank}'s layer {what} returned {kind} for finite inputs",
    "loss": "rank {rank}'s loss function returned {kind} for finite outputs of all layers",
}
NOT_AGAIN = (
    "torch.autograd.set_detect_anomaly(True) names the operation; lower the learning rate or clip gradients if it recurs; if it is always the same rank, "
    "test its device: muster doctor"
)

LossFunction = Callable[[nn.Module, Any], Any]


def worst(tensor: torch.Tensor) -> str | None:
    """Return ``NaN`` or ``Inf`` if the tensor (or this rank's shard) has one, else None."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    if bool(own.isfinite().all()):
        return None
    return "NaN" if bool(own.isnan().any()) else "Inf"


class NanHooks:
    """Watches a model inside a ``with``: ``layer`` is the first that returned NaN, else the first with Inf.

    Inf gives way because masks often contain it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.layer: dict[str, str] | None = None

    def __enter__(self) -> "NanHooks":
        for name, module in self._model.named_modules():
            # A module's hook runs after those of its submodules: the innermost is first.
            check = partial(self._check, own_name(name) or type(module).__name__)
            self._handles.append(module.register_forward_hook(check))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _check(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for _, tensor in named_tensors(output):
            kind = worst(tensor)
            if kind is not None and (
                self.layer is None or (self.layer["kind"], kind) == ("Inf", "NaN")
            ):
                self.layer = {"what": name, "kind": kind}


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
        # Not DDP itself: after a forward without gradients it does not broadcast buffers in the next one.
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
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
        causes: dict[str, Any] = {}
        weights = bad_names(self._model.named_parameters())
        if weights:
            causes["weights"] = {"what": weights[0]}
        with no_effect(self._model, self._world):
            for micro in micro_batches:
                with torch.no_grad(), NanHooks(self._model) as hooks:
                    kind = worst(self._total(loss_fn, micro))
                if kind is not None and "loss" not in causes:
                    causes["loss"] = {"kind": kind, "samples": list(micro.indices)}
                    if hooks.layer is not None:
                        causes["layer"] = {**hooks.layer, "samples": list(micro.indices)}
                    causes |= bad_input(micro)
        return causes

    def _total(self, loss_fn: LossFunction, micro: MicroBatch) -> torch.Tensor:
        with self._precision.autocast(self._world.device):
            loss = loss_fn(self._model, micro.batch)
        total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
        return total

    def _finding(self, where: str, of_ranks: list[dict[str, Any]]) -> Finding:
        what = "a gradient was not finite in the backward pass: a forward pass is finite when recomputed"
        notes = [
            "a root or division at 0, values near overflow, other random numbers (dropout), or a faulty device"
        ]
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

    In other batches Inf may be intended, as in masks.
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
