"""One optimizer step over any number of micro-batches and ranks, equal to one process with the whole batch.

Each loss is weighted by its count relative to the count of *all* ranks in *all* micro-batches of
the step; a mean of means would differ wherever counts differ::

    for step in loader.epoch(epoch):
        for micro in update.accumulate(step):
            with precision.autocast(device):
                loss = …                   # the mean over the micro-batch's samples
            update.backward(loss)          # or backward(total, count): a sum and its count
        outcome = update.apply()

The device decides whether a step is applied, so the host need not wait: torch's fused Adam and
AdamW read the decision from a tensor. For every other optimizer the host reads it in every step.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from torchmuster.errors import MusterError
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.progress import progress
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.torch_private import multiply_all
from torchmuster.train.world import World, is_simulated, most_exact_type

if TYPE_CHECKING:  # imported only for fp16
    from torchmuster.train.loss_scale import LossScale

_LOOP = "for micro in update.accumulate(step): … update.backward(loss); then update.apply(), once a step"


class HostCopy:
    """A copy of a few numbers that the device has yet to compute.

    Reading it waits for this copy only, not for all queued work: the device stays busy if the
    caller has queued more.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._numbers = numbers
        if numbers.device.type not in ("cpu", "mps"):  # whose memory the host can read
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.Event(numbers.device)
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


class StepResult:
    """The result of a step; the same on every rank.

    ``applied`` and ``overflowed`` wait until the device has computed the step; after the next step's
    ``apply()`` they are available without waiting.
    """

    def __init__(
        self,
        found_inf: torch.Tensor,
        *,
        norm: torch.Tensor | None,
        micro_batches: Sequence[MicroBatch],
        scale: torch.Tensor | None = None,
    ) -> None:
        self.found_inf = found_inf  # 1 if the step was skipped, else 0
        self.norm = norm  # before clipping, a tensor on the device; None if clipping is off
        self.micro_batches = micro_batches  # to search for non-finite values
        numbers = found_inf.reshape(1)
        if scale is not None:
            numbers = torch.stack([found_inf, scale])
        self._copy = HostCopy(numbers)
        self._numbers: list[float] | None = None

    def read(self) -> list[float]:
        """Return ``found_inf``, and with fp16 the loss scale of this step."""
        if self._numbers is None:
            self._numbers = self._copy.read()
        return self._numbers

    def assume_applied(self) -> None:
        """Do not read the result of the step: the planner's tensors have no values."""
        self._numbers = [0.0]

    @property
    def applied(self) -> bool:
        """False: a gradient was not finite, and no rank changed its weights."""
        return self.read()[0] == 0.0

    @property
    def overflowed(self) -> bool:
        """fp16 only: the loss scale was too large, and is smaller now."""
        return not self.applied and len(self.read()) > 1 and self.read()[1] > 1.0


class TrainStep:
    """Accumulates, weights, clips and applies gradients; the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        world: World,
        *,
        precision: Precision = FP32,
        clip_norm: float | None = None,
        schedule: LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy
        self._world = world
        self._clip_norm = clip_norm
        self._schedule = schedule
        self._parameters: Sequence[nn.Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._scale: LossScale | None = None
        if precision.needs_scaler:
            from torchmuster.train import loss_scale

            loss_scale.refuse_half_weights(self._parameters)
            self._scale = loss_scale.LossScale(world, scaler)
        self._counts_items: bool | None = None  # unknown until the first loss
        self._on_device = _decides_on_device(optimizer, world.device)
        self._is_simulated = is_simulated(world)
        self._checked = False  # whether every parameter gets a gradient
        self._step: Step | None = None  # the current one
        self._micro: MicroBatch | None = None  # the one whose loss is expected next
        self._counted: int | float | torch.Tensor | None = None  # by this rank, in this step
        self._counting: dist.Work | None = None  # for the count over all ranks
        self._last = False
        self._seen: list[MicroBatch] = []  # of the current step
        self._uncounted: StepResult | None = None  # of the last step, for the loss scale's warnings

    def accumulate(self, step: Step) -> Iterator[MicroBatch]:
        """Yield the micro-batches; ranks synchronize gradients only in the last backward.

        RuntimeError if a micro-batch has no backward, or if their number is not ``step.rounds``.
        """
        if self._step is not None:
            raise RuntimeError(f"a step was started before the previous one was applied: {_LOOP}")
        self._step = step
        self._strategy.begin_step(self._model)
        self._counted = self._counting = None
        self._seen = []
        for micro in step.micro_batches:
            self._seen.append(micro)
            self._micro = micro
            self._last = len(self._seen) == step.rounds
            communication: AbstractContextManager[None] = nullcontext()
            if not self._last:
                communication = self._strategy.accumulating(self._model)
            with communication:
                yield micro
            self._check_rounds(step, at_end=self._last)
        self._check_rounds(step, at_end=True)

    def _check_rounds(self, step: Step, *, at_end: bool) -> None:
        """Raise unless every micro-batch so far had its backward; at the end, unless all of them."""
        done = len(self._seen) - (self._micro is not None)
        if self._micro is not None or done > step.rounds or (at_end and done < step.rounds):
            raise RuntimeError(
                f"{done} of {step.rounds} micro-batches of step {step.number} of epoch {step.epoch} "
                "had a backward. Ranks synchronize gradients in the last one, so each rank must "
                f"compute all of them: {_LOOP}"
            )

    def backward(self, loss: torch.Tensor, count: int | torch.Tensor | None = None) -> None:
        """Run the backward of a micro-batch's weighted loss.

        Without ``count`` the loss is the mean over the micro-batch's samples. With ``count`` it is a
        sum over that many items (tokens); the ranks add up both sums and counts.
        """
        step, micro = self._step, self._micro
        if step is None or micro is None:
            raise RuntimeError(f"backward() was called, but no micro-batch expects a loss: {_LOOP}")
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise _no_loss(loss)
        if self._counts_items not in (None, count is not None):
            raise MusterError(
                "the loss function returned a mean once, and (total, count) once",
                why="all losses of a step must be of the same kind, on all ranks",
                fix="always return the mean, or always (total, count)",
            )
        self._counts_items = count is not None
        progress.phase = "backward"
        self._micro = None
        samples = micro.samples
        ranks = self._world.world_size  # the strategies give the mean over the ranks
        if count is None and step.samples is not None:
            weight = samples * ranks / step.samples
        else:
            if count is None:
                loss, count = loss * samples, samples
            elif samples == 0:
                count = 0
            # The total count is known only later; until then gradients keep a reasonable size.
            weight = (ranks if samples else 0) / step.nominal_samples
            self._count(count)
        if weight != 1.0:
            loss = loss * weight
        if self._scale is not None:
            loss = self._scale.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def _count(self, count: int | torch.Tensor) -> None:
        """Add to the count; with the last micro-batch, start its all-reduce during the backward."""
        counted = count if self._counted is None else self._counted + count
        if self._last and self._world.world_size > 1:
            device = self._world.device
            dtype = most_exact_type(device)
            if isinstance(counted, torch.Tensor):  # the caller's own tensor must keep its value
                counted = counted.detach().to(device, dtype, non_blocking=True, copy=True)
            else:  # written by the device: a copy from the host would wait for it
                counted = torch.full((), counted, dtype=dtype, device=device)
            self._counting = dist.all_reduce(counted, async_op=True)
        self._counted = counted

    def apply(self) -> StepResult:
        """Weight, check that all ranks' gradients are finite, clip, step, and clear the gradients."""
        step = self._step
        if step is None:
            raise RuntimeError(f"apply() was called without a step: {_LOOP}")
        self._check_rounds(step, at_end=True)
        self._step = None
        progress.phase = "update"
        if not self._checked:
            self._strategy.check_gradients(self._model)
            self._checked = True
        scale = None
        if self._scale is not None:
            self._scale.scaler.unscale_(self._optimizer)
            scale = self._scale.scaler.scale(torch.ones((), device=self._world.device))
            self._scale.scaler.update()
        factor = self._correction(step)
        clip = self._clip_norm is not None
        found_inf, norm = self._strategy.measure_gradients(self._parameters, norm=clip)
        if norm is not None and self._clip_norm is not None:
            norm = norm if factor is None else norm * factor
            # As torch's clip_grad_norm_ does it.
            clipping = (self._clip_norm / (norm + 1e-6)).clamp_(max=1.0)
            factor = clipping if factor is None else clipping * factor
        result = StepResult(found_inf, norm=norm, micro_batches=self._seen, scale=scale)
        if self._is_simulated:
            result.assume_applied()
        self._apply(result, factor)
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        self._seen = []
        self._count_result()
        self._uncounted = result
        return result

    def _apply(self, result: StepResult, factor: torch.Tensor | float | None) -> None:
        """Multiply the gradients and step, unless a gradient is not finite."""
        optimizer: Any = self._optimizer
        if self._on_device:
            if factor is not None:
                scale_gradients(self._parameters, factor)
            optimizer.found_inf = result.found_inf
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf
        elif result.applied:
            if factor is not None:
                scale_gradients(self._parameters, float(factor))
            optimizer.step()

    def _count_result(self) -> None:
        """Count the last step for the loss scale: one step later, so that the host need not wait."""
        result, self._uncounted = self._uncounted, None
        if result is not None and self._scale is not None:
            self._scale.count(result.read()[-1], applied=result.applied)

    def _correction(self, step: Step) -> torch.Tensor | float | None:
        """Return the remaining factor of the gradients, from the count over all ranks; None: no factor."""
        counted = self._counted
        if counted is None:
            return None
        if self._counting is not None:
            self._counting.wait()
        if not isinstance(counted, torch.Tensor):
            return step.nominal_samples / (counted or 1.0)
        # Count 0: all gradients are 0.
        return step.nominal_samples / torch.where(counted == 0, 1.0, counted)

    def loss_scale(self) -> float | None:
        """Return the current loss scale (fp16); None for other precisions. Waits for the device."""
        return None if self._scale is None else float(self._scale.scaler.get_scale())

    def state(self) -> dict[str, Any]:
        """Return the state to save in addition to optimizer and schedule, as plain JSON types."""
        self._count_result()
        return {"loss_scale": None if self._scale is None else self._scale.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; one that was saved in another precision is ignored."""
        if self._scale is not None and state["loss_scale"] is not None:
            self._scale.restore(state["loss_scale"])


def _decides_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer reads from a device tensor whether to apply a step."""
    # Not SGD: if its first step is skipped, torch's fused SGD uses an uninitialized momentum
    # buffer.
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"]
        and all(parameter.device.type == device.type for parameter in group["params"])
        for group in optimizer.param_groups
    )


def scale_gradients(parameters: Sequence[nn.Parameter], by: torch.Tensor | float) -> None:
    """Multiply all gradients, whole or sharded, in place."""
    if not isinstance(by, torch.Tensor) and by == 1.0:
        return
    with torch.no_grad():  # else autograd records to_local()
        gradients = [
            grad.to_local() if isinstance(grad, DTensor) else grad
            for grad in (parameter.grad for parameter in parameters)
            if grad is not None
        ]
        if isinstance(by, torch.Tensor) and gradients:
            # As torch treats a Python number: in fp32 for gradients of lower precision.
            by = by.to(torch.promote_types(gradients[0].dtype, torch.float32))
        multiply_all(gradients, by)


def _no_loss(loss: Any) -> MusterError:
    """Return the error that explains why the loss has no backward."""
    described = f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        described = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    return MusterError(
        f"the loss is {described}, but must be one number that depends on trained parameters",
        fix="return the mean or (total, count) as tensors: without .item(), detach() or no_grad()",
    )
