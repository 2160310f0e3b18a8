"""``StepLog``: sums what each step did, and makes a step line of all ranks' sums when one is due."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train.data.step import MicroBatch
from torchmuster.train.data.worker_processes import advise_workers
from torchmuster.train.progress import progress
from torchmuster.train.reports import Reports
from torchmuster.train.step_line import StepRecord, dominant_cost
from torchmuster.train.torch_private import ddp_measurements, let_ddp_measure
from torchmuster.train.world import Totals, World, memory_peak

_FOLD_AT_STEPS = 1000  # the maximum number of steps whose losses are kept as tensors
# The record of longer steps is shown at once: waiting for the other ranks takes little in comparison.
_SHOWN_AT_ONCE_S = 0.1
# DDP returns a large table of measurements, the slowest part of a step line: seconds between two reads.
_READ_DDP_EVERY_S = 1.0
_FEWEST_MEASURED = 5  # iterations: a single one may be an outlier
_SUMS = 4  # numbers of a line that are sums over the ranks; of the others each rank has its own

Count = int | torch.Tensor | None


class _Loss(NamedTuple):
    """The loss of a micro-batch: a mean, or with ``items`` a total."""

    value: torch.Tensor
    samples: int
    items: Count


class _Line(NamedTuple):
    """What this rank knows of a line without the other ranks."""

    step: int
    epoch: int
    learning_rate: float
    norm: float | None
    loss_scale: float | None
    steps: int
    skipped: int
    spent_s: dict[str, float]
    counts_items: bool
    is_first: bool  # it covers one-time initialization


class StepLog:
    """Sums losses, samples and times of this rank, and reports those of all ranks in step lines.

    Nothing communicates or waits for the device until a line is due. Then one asynchronous all-reduce sums
    the numbers of all ranks; for short steps, its result is read one step later. A line follows the first
    step, and then whenever ``reports`` says that one is due.

    The time from :meth:`wait` to :meth:`work` counts as waiting for data.
    """

    def __init__(
        self,
        world: World,
        reports: Reports,
        *,
        model: nn.Module | None = None,
        workers: int | None = None,
        flops_of_batch: Callable[[Any], float] | None = None,
        peak_flop_s: float | None = None,
        loss_scale: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``workers`` are the loader's, ``peak_flop_s`` is the device's peak rate: None if unknown.

        ``model`` is asked how long its communication took. ``loss_scale`` waits for the device, so it is
        called for each line only.
        """
        self._world = world
        self._reports = reports
        self._flops_of_batch = flops_of_batch
        self._peak_flop_s = peak_flop_s
        self._loss_scale = loss_scale
        self._communication = CommunicationTime(model, world)
        self._data_fix = "more loader workers"
        if workers is not None:
            from torchmuster.devices.readers.cpu import usable_cores

            self._data_fix = advise_workers(
                workers=workers, cores=usable_cores().value, ranks=world.local_world_size
            )
        self._next = 1  # the step of the next line
        self._pending: tuple[Totals, _Line] | None = None
        self.begin()

    def begin(self) -> None:
        """Start the clock, and drop what was summed before."""
        self._clear()
        self.last_record: StepRecord | None = None
        self._is_first = True
        self._begun_s = time.perf_counter()
        self.elapsed_s = 0.0  # by rank 0's clock, up to the last line: the same on all ranks

    def _clear(self) -> None:
        self._steps = 0  # since the last line
        self._samples = 0
        self._skipped = 0
        self._flops = 0.0  # of forward and backward; 0 if unknown
        self._spent_s = {"data": 0.0, "saving": 0.0, "evaluating": 0.0}
        self._loss_sum = 0.0
        self._loss_count = 0.0
        self._counts_items = False
        # Of the running step, and of finished steps with whether they were skipped (1, else 0).
        self._losses: list[_Loss] = []
        self._finished: list[tuple[torch.Tensor, list[_Loss]]] = []

    def wait(self) -> None:
        """Mark the start of waiting for data."""
        progress.phase = "loading data"
        self._waits_since_s = time.perf_counter()

    def work(self) -> None:
        """Mark the end of waiting for data."""
        self._spent_s["data"] += time.perf_counter() - self._waits_since_s
        progress.phase = "forward"

    @contextmanager
    def spending(self, phase: str) -> Iterator[None]:
        """Count the time inside the ``with`` as "saving" or "evaluating"."""
        progress.phase = phase
        begun_s = time.perf_counter()
        yield
        self._spent_s[phase] += time.perf_counter() - begun_s
        progress.phase = "loading data"

    def add(self, micro: MicroBatch, loss: torch.Tensor, count: Count) -> None:
        """Add a micro-batch: the mean loss of its samples, or with ``count`` the total over items."""
        if micro.samples:
            self._samples += micro.samples
            self._losses.append(_Loss(loss.detach(), micro.samples, count))
            if self._flops_of_batch is not None:
                self._flops += self._flops_of_batch(micro.batch)

    def end_step(
        self,
        found_inf: torch.Tensor,
        *,
        epoch: int,
        learning_rate: float,
        norm: float | torch.Tensor | None,
    ) -> None:
        """Count a step; the losses of a skipped step (``found_inf`` is 1, not 0) do not count."""
        self._steps += 1
        self._last = (epoch, learning_rate, norm)
        self._finished.append((found_inf, self._losses))
        self._losses = []
        if len(self._finished) >= _FOLD_AT_STEPS:
            self._fold()

    def report(self, step: int) -> None:
        """Show the last line, if it was not shown yet, and make the next one if it is due (a collective)."""
        self.flush()
        if step == self._next:
            self._begin_line(step)
            if self.last_record is None or self.last_record.step_s >= _SHOWN_AT_ONCE_S:
                self.flush()

    def finish(self, step: int) -> None:
        """Make a line of the remaining steps, if there are any."""
        self.flush()
        if self._steps:
            self._begin_line(step)
            self.flush()

    def flush(self) -> None:
        """Show the pending line, if there is one; waits for the other ranks."""
        if self._pending is None:
            return
        (totals, line), self._pending = self._pending, None
        record = self._record(totals.wait(), line)
        self._next = self._reports.next_line(record.step, record.step_s)
        self._reports.record(record)
        self.last_record = record

    def resume_at(self, step: int) -> None:
        """Make the next line where a run that was not interrupted makes one."""
        if step:
            self._next = self._reports.next_usual_line(step)

    def _fold(self) -> None:
        """Add up the losses of the finished steps, with one read for all of them."""
        if not self._finished:
            return
        skipped = torch.stack([found_inf for found_inf, _ in self._finished]).tolist()
        losses: list[_Loss] = []
        for (_, of_step), is_skipped in zip(self._finished, skipped, strict=True):
            if is_skipped:
                self._skipped += 1
            else:
                losses += of_step
        self._finished = []
        if not losses:
            return
        values = torch.stack([loss.value.reshape(()) for loss in losses]).tolist()
        counts_on_device = []
        for value, (_, samples, count) in zip(values, losses, strict=True):
            self._counts_items = count is not None
            self._loss_sum += value if self._counts_items else value * samples
            if isinstance(count, torch.Tensor):
                counts_on_device.append(count.reshape(()))
            else:
                self._loss_count += samples if count is None else count
        if counts_on_device:
            self._loss_count += sum(torch.stack(counts_on_device).tolist())

    def _begin_line(self, step: int) -> None:
        """Start to sum this line's numbers over the ranks; waits for the device."""
        world = self._world
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        self._fold()
        ended_s = time.perf_counter()
        wall_s = ended_s - self._begun_s
        waited_s = self._communication.exposed_s(self._steps)
        progress.data_share = _share(self._spent_s["data"], wall_s)
        progress.communication_share = None if waited_s is None else _share(waited_s, wall_s)
        sums = [self._loss_sum, self._loss_count, self._samples, self._flops]
        # Each rank has slots of its own in these, so that all ranks read exactly the same numbers.
        own = [wall_s, self._spent_s["data"], math.nan if waited_s is None else waited_s]
        own += [memory_peak(world.device), self._peak_flop_s or 0.0]
        slots = [0.0] * (len(own) * world.world_size)
        slots[world.global_rank :: world.world_size] = own
        epoch, learning_rate, norm = self._last
        line = _Line(
            step=step,
            epoch=epoch,
            learning_rate=learning_rate,
            norm=None if norm is None else float(norm),
            loss_scale=self._loss_scale(),
            steps=self._steps,
            skipped=self._skipped,
            spent_s=self._spent_s,
            counts_items=self._counts_items,
            is_first=self._is_first,
        )
        self._pending = Totals(sums + slots, world), line
        self._clear()
        self._is_first = False
        self._begun_s = ended_s

    def _record(self, totals: list[float], line: _Line) -> StepRecord:
        """Return the record of the ranks' sums; the same on every rank."""
        ranks = self._world.world_size
        loss, count, samples, flops = totals[:_SUMS]
        walls, datas, waits, memories, rates = (
            totals[begin : begin + ranks] for begin in range(_SUMS, len(totals), ranks)
        )
        wall_s = walls[0]
        self.elapsed_s += wall_s
        saving = _share(line.spent_s["saving"], wall_s)
        evaluation = _share(line.spent_s["evaluating"], wall_s)
        data_shares = list(map(_share, datas, walls))
        data = sum(data_shares) / ranks
        rest = max(0.0, 1.0 - data - saving - evaluation)
        communication, wait_shares = None, None
        if not any(map(math.isnan, waits)):
            # DDP measures only some steps, so its figures are limited to the remaining time.
            wait_shares = []
            for wait_s, wall, share in zip(waits, walls, data_shares, strict=True):
                most = max(0.0, 1.0 - share - saving - evaluation)
                wait_shares.append(min(_share(wait_s, wall), most))
            communication = min(sum(map(_share, waits, walls)) / ranks, rest)
        verdict = ""
        if not line.is_first:
            verdict = dominant_cost(
                data_shares=data_shares,
                communication_shares=wait_shares,
                checkpoint_share=saving,
                data_fix=self._data_fix,
            )
        return StepRecord(
            step=line.step,
            epoch=line.epoch,
            learning_rate=line.learning_rate,
            gradient_norm=line.norm,
            loss_scale=line.loss_scale,
            skipped_steps=line.skipped,
            loss=loss / count if count else None,
            samples=round(samples),
            samples_per_s=samples / wall_s,
            tokens_per_s=count / wall_s if line.counts_items else None,
            step_s=wall_s / max(line.steps, 1),
            data_share=data,
            compute_share=rest - (communication or 0.0),
            communication_share=communication,
            checkpoint_share=saving,
            evaluation_share=evaluation,
            memory_peak_bytes=round(max(memories)),
            flop_s=flops / wall_s if flops else None,
            mfu=flops / wall_s / sum(rates) if flops and all(rates) else None,
            verdict=verdict,
        )


class CommunicationTime:
    """Measures how long steps waited for communication that did not overlap with compute.

    It includes waiting for slower ranks. DDP measures it itself, in its first 10 iterations and every Nth later;
    timing from outside would need a hook on every parameter. How long FSDP waits, only a profiler sees.
    """

    def __init__(self, model: nn.Module | None, world: World) -> None:
        self._is_alone = world.world_size == 1
        # On an accelerator, a measured step waits for the device: torch's own rate there.
        self._every = 10 if world.device.type == "cpu" else 100
        self._model = None
        if isinstance(model, DistributedDataParallel):
            let_ddp_measure(model, every=self._every)
            self._model = model
        self._measured = 0  # iterations that DDP has measured so far
        self._sum_ns = 0  # their waiting time
        self._mean_s: float | None = None
        self._read_s = 0.0

    def exposed_s(self, steps: int) -> float | None:
        """Return the seconds that this number of steps waited; None if it is not known."""
        if self._is_alone:
            return 0.0
        if self._model is None:
            return None
        now_s = time.monotonic()
        if self._mean_s is None or now_s - self._read_s >= _READ_DDP_EVERY_S:
            self._read_s = now_s
            self._read(self._model)
        return None if self._mean_s is None else self._mean_s * steps

    def _read(self, model: DistributedDataParallel) -> None:
        measurements = ddp_measurements(model)
        if "avg_backward_comm_time" not in measurements:
            return
        iteration = int(measurements.get("iteration", 0))
        measured = min(iteration, 10) + max(0, iteration // self._every - 10 // self._every)
        if measured - self._measured >= _FEWEST_MEASURED:
            # DDP reports the average since the start; the difference of sums covers the steps since.
            exposed_ns = int(measurements["avg_backward_comm_time"])
            exposed_ns -= int(measurements["avg_backward_compute_comm_overlap_time"])
            sum_ns = exposed_ns * measured
            self._mean_s = max(0.0, (sum_ns - self._sum_ns) / (measured - self._measured) / 1e9)
            self._measured, self._sum_ns = measured, sum_ns


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0
