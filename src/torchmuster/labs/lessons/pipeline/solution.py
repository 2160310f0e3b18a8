"""Everything from the earlier labs in one trainer, with profiling and monitoring."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Settings(NamedTuple):
    """The settings of a run; ``decay`` multiplies the learning rate after each optimizer step."""

    rate: float = 0.1
    decay: float = 0.9
    accumulation: int = 2
    max_norm: float = 1.0


class ProductionTrainer:
    """DDP, bf16, accumulation, a schedule and checkpoints. The batches are this rank's own."""

    def __init__(
        self, model: nn.Module, train_batches: Batches, val_batches: Batches, settings: Settings
    ) -> None:
        """Create ``model`` (DDP), ``optimizer`` (SGD) and ``scheduler`` (ExponentialLR).

        ``model`` is on its device already; DDP gets that device as ``device_ids`` on a GPU.
        """
        self.train_batches = train_batches
        self.val_batches = val_batches
        self.settings = settings
        self.device = next(model.parameters()).device
        # solution
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids=device_ids)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.rate)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, settings.decay)
        # end of solution

    def train_epoch(self) -> float:
        """Train on all batches; return the mean of their losses (cross entropy) over all ranks.

        A step uses ``accumulation`` batches, the last one the rest. All ranks have the same number
        of batches.
        """
        # solution
        total = torch.zeros(1, device=self.device)
        size = self.settings.accumulation
        for begin in range(0, len(self.train_batches), size):
            total += self._step(self.train_batches[begin : begin + size])
        dist.all_reduce(total)
        return float(total) / len(self.train_batches) / dist.get_world_size()
        # end of solution

    def _step(self, group: Batches) -> float:
        """Run one optimizer step over a few batches; return the sum of their losses."""
        # solution
        total = 0.0
        self.optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(group, 1):
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            with nullcontext() if number == len(group) else self.model.no_sync():
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(self.model(inputs), targets)
                (loss / len(group)).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        return total
        # end of solution

    def validate(self) -> float:
        """Return the mean loss over all samples of all ranks; their numbers may differ."""
        # solution
        total = torch.zeros(2, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for inputs, targets in self.val_batches:
                inputs, targets = inputs.to(self.device), targets.to(self.device)
                loss = nn.functional.cross_entropy(self.model.module(inputs), targets)
                total += torch.tensor([loss.item() * len(inputs), len(inputs)], device=self.device)
        self.model.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])
        # end of solution

    def save_checkpoint(self, path: str, epoch: int) -> None:
        """Write everything needed for a resume on rank 0; every rank waits for it.

        A crash during the save must leave the older checkpoint whole.
        """
        # solution
        if dist.get_rank() == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, f"{path}.new")
            Path(f"{path}.new").replace(path)
        dist.barrier()
        # end of solution

    def load_checkpoint(self, path: str) -> int:
        """Restore the state on this rank; return the next epoch."""
        # solution
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return int(state["epoch"]) + 1
        # end of solution


def profile_steps(
    parts: Mapping[str, Callable[[], object]], steps: int, trace: str
) -> dict[str, float]:
    """Profile steps of these parts; return each part's share of the time, by name.

    Mark each part with ``record_function(name)``, give the profiler a ``schedule`` with one step to warm up, and export
    the trace to ``trace`` (Chrome's format). The shares add up to 1.
    """
    # solution
    plan = schedule(wait=0, warmup=1, active=steps)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    times = dict.fromkeys(parts, 0.0)

    def collect(profiler: profile) -> None:
        profiler.export_chrome_trace(trace)
        for event in profiler.key_averages():
            if event.key in times:
                times[event.key] = event.cpu_time_total

    with profile(activities=activities, schedule=plan, on_trace_ready=collect) as profiler:
        for _ in range(1 + steps):
            for name, part in parts.items():
                with record_function(name):
                    part()
            profiler.step()
    return {name: times[name] / sum(times.values()) for name in parts}
    # end of solution


def gpu_metrics() -> dict[str, float]:
    """Return "utilization" (%), "memory_bytes" and "temperature_c" of GPU 0 from NVML.

    Without NVML (``import pynvml`` or ``nvmlInit`` fails), return an empty dict.
    """
    # solution
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no GPU, no driver or no pynvml on this machine
        return {}
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    temperature = pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
    return {
        "utilization": float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "memory_bytes": float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "temperature_c": float(temperature),
    }
    # end of solution


class Monitor:
    """Stores a row for every ``every``-th step on rank 0, writes it to TensorBoard, and raises alerts.

    ``writer`` is a ``torch.utils.tensorboard.SummaryWriter``, or None.
    """

    def __init__(self, rank: int, every: int, writer: Any = None) -> None:
        self.rank = rank
        self.every = every
        self.writer = writer
        self.rows: list[tuple[int, float, float]] = []  # step, loss, samples/s

    def log(self, step: int, loss: torch.Tensor, samples_per_s: float) -> None:
        """Store a row of plain numbers on rank 0 if the step is due (0, every, …).

        TensorBoard gets "loss", "samples_per_s", and each of :func:`gpu_metrics` as "gpu/NAME".
        """
        # solution
        if self.rank != 0 or step % self.every != 0:
            return
        self.rows.append((step, loss.item(), samples_per_s))
        if self.writer is not None:
            self.writer.add_scalar("loss", loss.item(), step)
            self.writer.add_scalar("samples_per_s", samples_per_s, step)
            for name, value in gpu_metrics().items():
                self.writer.add_scalar(f"gpu/{name}", value, step)
        # end of solution

    def render(self) -> str:
        """Return the last row in Prometheus format, such as ``train_step 20``, a line per metric."""
        # solution
        step, loss, rate = self.rows[-1]
        return f"train_step {step}\ntrain_loss {loss}\ntrain_samples_per_second {rate}\n"
        # end of solution

    def alerts(self) -> list[str]:
        """Return "loss-not-finite" and "slow" (below half of the best rate) for the last row."""
        # solution
        _, loss, rate = self.rows[-1]
        alerts = []
        if not math.isfinite(loss):
            alerts.append("loss-not-finite")
        if rate < 0.5 * max(row[2] for row in self.rows):
            alerts.append("slow")
        return alerts
        # end of solution
