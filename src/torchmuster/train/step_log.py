"""``StepLog``: sums what each step did, and makes a step line of all ranks' sums when one is due."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train.data.step import MicroBatch
from torchmuster.train.data.worker_processes import advise_workers
from torchmuster.train.progress import progress
from torchmuster.train.reports import Reports
from torchmuster.train.step_line import StepRecord, dominant_cost
from torchmuster.train.torch_private import ddp_measurements, let_ddp_measure
from torchmuster.train.world import Totals, World, all_gather_object

_FOLD_AT_STEPS = 1000  # the maximum number of steps whose losses are kept as tensors
# The record of longer steps is shown at once: waiting for the other ranks takes little in comparison.
_SHOWN_AT_ONCE_S = 0.1
# DDP returns a large table of measurements, the slowest part of a step line: seconds between two reads.
_READ_DDP_EVERY_S = 1.0
_FEWEST_MEASURED = 5  # iterations: a single one may be an outlier

Count = int | torch.Tensor | None


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
        # Epoch, learning rate and gradient norm of the last step.
        self._last: tuple[int, float, float | torch.Tensor | None] = (0, 0.0, None)
        self._pending: tuple[Totals, dict[str, Any]] | None = None
        self.last_record: StepRecord | None = None
        self.elapsed_s = 0.0  # by rank 0's clock, up to the last line: the same on all ranks
        self._clear()
        self.begin()

    def _clear(self) -> None:
        self.steps = 0  # since the last line, also before a resume
        self.samples = 0
        self.skipped = 0
        self.flops = 0.0  # of forward and backward; 0 if unknown
        self.spent_s = {"data": 0.0, "saving": 0.0, "evaluating": 0.0}
        self._loss_parts: list[float] = []  # whose sum is exact
        self._loss_count = 0.0
        self._counts_items = False
        # Of the running step, and of finished steps with whether they were skipped (1, else 0).
        self._losses: list[tuple[torch.Tensor, int, Count]] = []
        self._finished: list[tuple[torch.Tensor, list[tuple[torch.Tensor, int, Count]]]] = []
        self._before = (0, 0, 0.0)

    def begin(self) -> None:
        """Start the clock: what was summed before counts for the losses, not for the speed."""
        self._fold()
        self._losses = []
        self._before = (self.steps, self.samples, self._loss_count)
        self.flops = 0.0
        self.spent_s = dict.fromkeys(self.spent_s, 0.0)
        self.last_record = None
        self._is_first = True  # a line that covers one-time initialization
        self._begun_s = time.perf_counter()
        self.elapsed_s = 0.0

    def wait(self) -> None:
        """Mark the start of waiting for data."""
        progress.phase = "loading data"
        self._waits_since_s = time.perf_counter()

    def work(self) -> None:
        """Mark the end of waiting for data."""
        self.spent_s["data"] += time.perf_counter() - self._waits_since_s
        progress.phase = "forward"

    @contextmanager
    def spending(self, phase: str) -> Iterator[None]:
        """Count the time inside the ``with`` as "saving" or "evaluating"."""
        progress.phase = phase
        begun_s = time.perf_counter()
        yield
        self.spent_s[phase] += time.perf_counter() - begun_s
        progress.phase = "loading data"

    def add(self, micro: MicroBatch, loss: torch.Tensor, count: Count) -> None:
        """Add a micro-batch: the mean loss of its samples, or with ``count`` the total over items."""
        if micro.samples:
            self.samples += micro.samples
            self._losses.append((loss.detach(), micro.samples, count))
            if self._flops_of_batch is not None:
                self.flops += self._flops_of_batch(micro.batch)

    def end_step(
        self,
        found_inf: torch.Tensor,
        *,
        epoch: int,
        learning_rate: float,
        norm: float | torch.Tensor | None,
    ) -> None:
        """Count a step; the losses of a skipped step (``found_inf`` is 1, not 0) do not count."""
        self.steps += 1
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
        if self.steps:
            self._begin_line(step)
            self.flush()

    def flush(self) -> None:
        """Show the pending line, if there is one; waits for the other ranks."""
        if self._pending is None:
            return
        (totals, own), self._pending = self._pending, None
        record = self._record(totals.wait(), own)
        self._next = self._reports.next_line(record.step, record.step_s)
        self._reports.record(record)
        self.last_record = record

    def _fold(self) -> None:
        """Add up the losses of the finished steps, with one read for all of them.

        The sum is exact, because saving also sums: the time of a save must not change the last digit of
        a mean.
        """
        if not self._finished:
            return
        skipped = torch.stack([found_inf for found_inf, _ in self._finished]).tolist()
        micro_batches = []
        for (_, losses), is_skipped in zip(self._finished, skipped, strict=True):
            if is_skipped:
                self.skipped += 1
            else:
                micro_batches += losses
        self._finished = []
        if not micro_batches:
            return
        # Most are scalars already, and checking is faster than a reshape.
        scalars = [loss if loss.dim() == 0 else loss.reshape(()) for loss, _, _ in micro_batches]
        counts_on_device = []
        for value, (_, samples, count) in zip(
            torch.stack(scalars).tolist(), micro_batches, strict=True
        ):
            self._counts_items = count is not None
            _add_exactly(self._loss_parts, value if self._counts_items else value * samples)
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
        steps_before, samples_before, items_before = self._before
        steps = self.steps - steps_before
        waited_s = self._communication.exposed_s(steps)
        progress.data_share = _share(self.spent_s["data"], wall_s)
        progress.communication_share = None if waited_s is None else _share(waited_s, wall_s)
        numbers = [math.fsum(self._loss_parts), self._loss_count, self.samples]
        numbers += [self.samples - samples_before, self._loss_count - items_before, self.flops]
        # Each rank has slots of its own in these, so that all ranks read exactly the same numbers.
        own = [wall_s, self.spent_s["data"], math.nan if waited_s is None else waited_s]
        own += [_memory_peak(world), self._peak_flop_s or 0.0]
        slots = [0.0] * (len(own) * world.world_size)
        slots[world.global_rank :: world.world_size] = own
        epoch, learning_rate, norm = self._last
        self._pending = (
            Totals(numbers + slots, world),
            {
                "step": step,
                "epoch": epoch,
                "learning_rate": learning_rate,
                "gradient_norm": None if norm is None else float(norm),
                "loss_scale": self._loss_scale(),
                "skipped_steps": self.skipped,
                "steps": steps,
                "spent_s": self.spent_s,
                "counts_items": self._counts_items,
                "is_first": self._is_first,
            },
        )
        self._clear()
        self._is_first = False
        self._begun_s = ended_s

    def _record(self, totals: list[float], own: dict[str, Any]) -> StepRecord:
        """Return the record of the ranks' sums; the same on every rank."""
        ranks = self._world.world_size
        loss, count, samples, new_samples, new_items, flops = totals[:6]
        walls, datas, waits, memories, rates = (
            totals[begin : begin + ranks] for begin in range(6, len(totals), ranks)
        )
        wall_s = walls[0]
        self.elapsed_s += wall_s
        steps, spent_s, is_first = own.pop("steps"), own.pop("spent_s"), own.pop("is_first")
        counts_items = own.pop("counts_items")
        saving, evaluation = (
            _share(spent_s["saving"], wall_s),
            _share(spent_s["evaluating"], wall_s),
        )
        data_shares = [_share(data_s, wall) for data_s, wall in zip(datas, walls, strict=True)]
        data = sum(data_shares) / ranks
        rest = max(0.0, 1.0 - data - saving - evaluation)
        communication, wait_shares = None, None
        if not any(map(math.isnan, waits)):
            # DDP measures only some steps, so its figures are limited to the remaining time.
            wait_shares = [
                min(_share(wait_s, wall), max(0.0, 1.0 - share - saving - evaluation))
                for wait_s, wall, share in zip(waits, walls, data_shares, strict=True)
            ]
            communication = min(
                sum(_share(*pair) for pair in zip(waits, walls, strict=True)) / ranks, rest
            )
        verdict = ""
        if not is_first:
            verdict = dominant_cost(
                data_shares=data_shares,
                communication_shares=wait_shares,
                checkpoint_share=saving,
                data_fix=self._data_fix,
            )
        return StepRecord(
            **own,
            loss=loss / count if count else None,
            samples=round(samples),
            samples_per_s=new_samples / wall_s,
            tokens_per_s=new_items / wall_s if counts_items else None,
            step_s=wall_s / max(steps, 1),
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

    def state(self) -> dict[str, Any]:
        """Return the state from which a resumed run makes the same next line (a collective)."""
        self.flush()
        self._fold()
        epoch, rate, norm = self._last
        own = {
            "losses": self._loss_parts,
            "count": self._loss_count,
            "samples": self.samples,
            "steps": self.steps,
            "skipped": self.skipped,
            "counts_items": self._counts_items,
        }
        return {
            "next": self._next,
            "last": [epoch, rate, None if norm is None else float(norm)],
            "sums": all_gather_object(own, self._world),
        }

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Restore a state; if the number of ranks has changed, rank 0 takes the sums of all."""
        # The next line may come sooner, if lines are due more often now.
        self._next = min(state["next"], self._reports.next_usual_line(step))
        epoch, rate, norm = state["last"]
        self._last = (epoch, rate, norm)
        self._clear()
        sums = state["sums"]
        self.steps, self.skipped = sums[0]["steps"], sums[0]["skipped"]  # equal on all ranks
        self._counts_items = any(of_rank["counts_items"] for of_rank in sums)
        if len(sums) == self._world.world_size:
            sums = [sums[self._world.global_rank]]
        elif not self._world.is_first:
            sums = []
        for of_rank in sums:
            self._loss_parts += of_rank["losses"]
            self._loss_count += of_rank["count"]
            self.samples += of_rank["samples"]


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
        if isinstance(model, DistributedDataParallel) and let_ddp_measure(model, every=self._every):
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


def _add_exactly(parts: list[float], number: float) -> None:
    """Add a number to an exact sum, held as parts of different magnitude, as ``math.fsum`` does."""
    count = 0
    for part in parts:
        large, small = sorted((number, part), key=abs, reverse=True)
        number = large + small
        rest = small - (number - large)
        if rest and math.isfinite(number):
            parts[count] = rest
            count += 1
    parts[count:] = [number]


def _memory_peak(world: World) -> int:
    if world.device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.accelerator.max_memory_allocated(world.device)


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0
