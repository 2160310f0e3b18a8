"""Sum metrics between two step lines, and combine all ranks' sums into one record.

Nothing here communicates or waits for the device until a record is made, and a record does not wait
for the other ranks: :class:`PendingRecord`.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.train.data.worker_processes import advise_workers
from torchmuster.train.metrics.communication import Communication
from torchmuster.train.metrics.step_line import StepRecord, dominant_cost
from torchmuster.train.progress import progress
from torchmuster.train.world import Totals, World, all_gather_object

_FOLD_AT = 1000  # the maximum number of losses kept as tensors


class StepMetrics:
    """Sums losses, counts and times of this rank since the last record.

    The time from :meth:`wait` to :meth:`work` counts as waiting for data.
    """

    def __init__(
        self,
        world: World,
        communication: Communication,
        *,
        workers: int | None = None,
        peak_flop_s: float | None = None,
    ) -> None:
        """``workers`` is the number of loader workers, ``peak_flop_s`` the device's peak rate.

        Unknown values are None.
        """
        self._peak_flop_s = peak_flop_s
        self._world = world
        if workers is not None:
            cores, ranks = usable_cores().value, world.local_world_size
            self._data_fix = advise_workers(workers=workers, cores=cores, ranks=ranks)
        else:
            self._data_fix = "more loader workers"
        self._communication = communication
        # Unsummed: a mean over samples, or a total and its count.
        self._losses: list[tuple[torch.Tensor, int, int | torch.Tensor | None]] = []
        # For each complete step: the number of losses up to it, and 1 if it was skipped, else 0.
        self._ends: list[tuple[int, torch.Tensor]] = []
        self._counts_items = False
        self.elapsed_s = 0.0  # by rank 0's clock, up to the last record: the same on all ranks
        self._clear()
        self.begin()

    def _clear(self) -> None:
        self._loss_parts: list[float] = []  # whose sum is exact
        self._loss_count = 0.0
        self.samples = 0
        self.flops = 0.0  # of forward and backward; 0 if unknown
        self.steps = 0
        # Of the run that was resumed: not part of this run's speed.
        self._steps_before = 0
        self._samples_before = 0
        self._items_before = 0.0
        self.skipped = 0
        self.data_s = 0.0
        self.checkpoint_s = 0.0
        self.evaluation_s = 0.0

    def begin(self) -> None:
        """Start the clock; earlier sums count for the losses, not for the speed."""
        self._fold()
        self._steps_before += self.steps
        self._samples_before += self.samples
        self._items_before = self._loss_count
        self.samples = self.steps = 0
        self.flops = 0.0
        self.data_s = self.checkpoint_s = self.evaluation_s = 0.0
        self._is_first = True
        self._begun = time.perf_counter()
        self.elapsed_s = 0.0

    @property
    def unreported(self) -> int:
        """Steps since the last record, including those before a resume; the same on all ranks."""
        return self.steps + self._steps_before

    @property
    def has_any(self) -> bool:
        """Whether anything was summed since the last record, including before a resume."""
        return self.unreported > 0

    def wait(self) -> None:
        """Mark the start of waiting for data."""
        self._waits_since = time.perf_counter()

    def work(self) -> None:
        """Mark the end of waiting for data."""
        self.data_s += time.perf_counter() - self._waits_since

    def add(self, loss: torch.Tensor, samples: int, count: int | torch.Tensor | None) -> None:
        """Add a micro-batch: the mean loss of its samples, or with ``count`` the total over items."""
        if samples:
            self.samples += samples
            self._losses.append((loss.detach(), samples, count))

    def end_step(self, found_inf: torch.Tensor) -> None:
        """Count a step; losses of a skipped step (``found_inf`` is 1, not 0) are dropped."""
        self.steps += 1
        self._ends.append((len(self._losses), found_inf))
        if len(self._losses) >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        """Sum the losses, and release their tensors and those of an unfinished step.

        The sum is exact, because saving also sums: the time of a save must not change the last
        digit of a mean.
        """
        # One read for all: separate reads would each wait for the device.
        found = torch.stack([one for _, one in self._ends]).tolist() if self._ends else []
        self.skipped += sum(1 for one in found if one)
        kept = []
        begin = 0
        for (end, _), skipped in zip(self._ends, found, strict=True):
            if not skipped:
                kept += self._losses[begin:end]
            begin = end
        self._ends.clear()
        self._losses.clear()
        if not kept:
            return
        # Most are scalars already, and checking is faster than a reshape.
        losses = torch.stack(
            [loss if loss.dim() == 0 else loss.reshape(()) for loss, _, _ in kept]
        ).tolist()
        if kept[0][2] is None:
            losses = [loss * samples for loss, (_, samples, _) in zip(losses, kept, strict=True)]
        else:
            self._counts_items = True
        for loss in losses:
            _add_exactly(self._loss_parts, loss)
        counts = [samples if count is None else count for _, samples, count in kept]
        self._loss_count += sum(one for one in counts if not isinstance(one, torch.Tensor))
        on_device = [one for one in counts if isinstance(one, torch.Tensor)]
        if on_device:
            self._loss_count += sum(torch.stack([one.reshape(()) for one in on_device]).tolist())

    def record(
        self,
        *,
        step: int,
        epoch: int,
        learning_rate: float,
        norm: float | None,
        loss_scale: float | None = None,
    ) -> "PendingRecord":
        """Start one record of all ranks' sums (a collective), and reset; waits for the device."""
        world = self._world
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        self._fold()
        ended = time.perf_counter()
        wall_s = ended - self._begun
        waited_s = self._communication.exposed_s(self.steps)
        progress.data_share = _step_metrics_share(self.data_s, wall_s)
        progress.communication_share = (
            None if waited_s is None else _step_metrics_share(waited_s, wall_s)
        )
        sums = [math.fsum(self._loss_parts), self._loss_count, self.samples]
        sums += [self._samples_before, self._items_before, self.flops]
        # Each rank has its own slot in these, so all ranks read exactly the same numbers.
        own = [
            wall_s,
            self.data_s,
            float("nan") if waited_s is None else waited_s,
            _memory_peak(world),
            self._peak_flop_s or 0.0,
        ]
        places = [[0.0] * world.world_size for _ in own]
        for place, number in zip(places, own, strict=True):
            place[world.global_rank] = number
        asked = Totals(sums + [number for place in places for number in place], world)
        facts = _OwnMetrics(
            step=step,
            epoch=epoch,
            learning_rate=learning_rate,
            norm=norm,
            loss_scale=loss_scale,
            steps=self.steps,
            skipped=self.skipped,
            checkpoint_s=self.checkpoint_s,
            evaluation_s=self.evaluation_s,
            counts_items=self._counts_items,
            is_first=self._is_first,
            data_fix=self._data_fix,
        )
        self._clear()
        self._is_first = False
        self._begun = ended
        return PendingRecord(asked, facts, world.world_size, self._elapsed)

    def _elapsed(self, more_s: float) -> None:
        self.elapsed_s += more_s

    def state(self) -> list[dict[str, Any]]:
        """Return each rank's sums since the last record (a collective), as plain JSON types."""
        self._fold()
        own = {
            "losses": self._loss_parts,
            "count": self._loss_count,
            "samples": self.samples + self._samples_before,
            "steps": self.steps + self._steps_before,
            "skipped": self.skipped,
            "counts_items": self._counts_items,
        }
        return all_gather_object(own, self._world)

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Restore sums; if the number of ranks has changed, rank 0 gets all of them."""
        mine = state if self._world.is_first else []
        if len(state) == self._world.world_size:
            mine = [state[self._world.global_rank]]
        self._loss_parts = [part for one in mine for part in one["losses"]]
        self._loss_count = self._items_before = sum(one["count"] for one in mine)
        self._samples_before = sum(one["samples"] for one in mine)
        self._steps_before, self.skipped = (
            state[0]["steps"],
            state[0]["skipped"],
        )  # equal on all ranks
        self._counts_items = any(one["counts_items"] for one in state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnMetrics:
    """The part of a record that every rank knows without communication."""

    step: int
    epoch: int
    learning_rate: float
    norm: float | None
    loss_scale: float | None
    steps: int
    skipped: int
    checkpoint_s: float
    evaluation_s: float
    counts_items: bool
    is_first: bool
    data_fix: str


class PendingRecord:
    """A record whose numbers are being summed over the ranks while training continues."""

    def __init__(
        self, asked: Totals, own: _OwnMetrics, ranks: int, on_elapsed: Callable[[float], None]
    ) -> None:
        """``on_elapsed`` gets the time that the record covers, the same on all ranks."""
        self._asked = asked
        self._own = own
        self._ranks = ranks
        self._on_elapsed = on_elapsed

    def finish(self) -> StepRecord:
        """Return the record; waits until all ranks have given their numbers."""
        own, size = self._own, self._ranks
        told = self._asked.wait()
        loss_sum, loss_count, samples, samples_before, items_before, flops = told[:6]
        rest = told[6:]
        walls, datas, waits, memories, rates = (
            rest[i * size : (i + 1) * size] for i in range(len(rest) // size)
        )
        self._on_elapsed(walls[0])
        return _as_record(
            _SummedMetrics(
                loss=loss_sum / loss_count if loss_count else None,
                samples=round(samples + samples_before),
                new_samples=round(samples),
                new_items=loss_count - items_before if own.counts_items else None,
                wall_s=walls[0],
                data_shares=[
                    _step_metrics_share(one, wall) for one, wall in zip(datas, walls, strict=True)
                ],
                waits=[
                    _step_metrics_share(one, wall) for one, wall in zip(waits, walls, strict=True)
                ],
                peak_bytes=round(max(memories)),
                flops=flops or None,
                peak_flop_s=sum(rates) if all(rates) else None,
            ),
            own,
        )


def _as_record(together: "_SummedMetrics", own: _OwnMetrics) -> StepRecord:
    wall_s = together.wall_s
    data = _step_metrics_mean(together.data_shares)
    checkpoint = _step_metrics_share(own.checkpoint_s, wall_s)
    evaluation = _step_metrics_share(own.evaluation_s, wall_s)
    rest = max(0.0, 1.0 - data - checkpoint - evaluation)
    measured = all(one == one for one in together.waits)
    flop_s = mfu = None
    if together.flops is not None:
        flop_s = together.flops / wall_s
        if together.peak_flop_s is not None:
            mfu = flop_s / together.peak_flop_s
    # DDP measures only some steps, so limit its figures to the remaining time.
    communication = min(_step_metrics_mean(together.waits), rest) if measured else None
    waits = [
        min(one, max(0.0, 1.0 - its_data - checkpoint - evaluation))
        for one, its_data in zip(together.waits, together.data_shares, strict=True)
    ]
    return StepRecord(
        step=own.step,
        epoch=own.epoch,
        loss=together.loss,
        learning_rate=own.learning_rate,
        gradient_norm=own.norm,
        samples=together.samples,
        samples_per_s=together.new_samples / wall_s,
        tokens_per_s=None if together.new_items is None else together.new_items / wall_s,
        step_s=wall_s / own.steps if own.steps else wall_s,
        data_share=data,
        compute_share=rest - (communication or 0.0),
        communication_share=communication,
        checkpoint_share=checkpoint,
        evaluation_share=evaluation,
        skipped_steps=own.skipped,
        memory_peak_bytes=together.peak_bytes,
        flop_s=flop_s,
        mfu=mfu,
        loss_scale=own.loss_scale,
        # The first record covers the first step, which includes one-time initialization.
        verdict=""
        if own.is_first
        else dominant_cost(
            data_shares=together.data_shares,
            communication_shares=waits if measured else None,
            checkpoint_share=checkpoint,
            data_fix=own.data_fix,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SummedMetrics:
    """The numbers of all ranks."""

    loss: float | None
    samples: int
    new_samples: int  # computed by this run, not before a resume
    new_items: float | None
    wall_s: float  # of rank 0
    data_shares: list[float]
    waits: list[float]
    peak_bytes: int
    flops: float | None  # None if unknown
    peak_flop_s: float | None  # of all devices; None if one of them is unknown


def _add_exactly(parts: list[float], number: float) -> None:
    """Add a number to an exact sum, kept as parts of different magnitude."""
    kept = 0
    for part in parts:
        large, small = (number, part) if abs(number) >= abs(part) else (part, number)
        number = large + small
        if (rest := small - (number - large)) and math.isfinite(number):
            parts[kept] = rest
            kept += 1
    parts[kept:] = [number]


def _memory_peak(world: World) -> int:
    if world.device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.accelerator.max_memory_allocated(world.device)


def _step_metrics_share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0


def _step_metrics_mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
