"""The tests of the lab pipeline: pytest tests/, or muster lab check."""

import json
import sys
import time
from typing import Any
from unittest.mock import MagicMock, call, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from torchmuster.labs.testing import (
    Submission,
    compare,
    exercise,
    is_close,
    of_all_ranks,
    require,
    watched,
    without,
)

_BATCHES, _RATE, _DECAY = 5, 0.1, 0.9


@exercise
def test_trainer(submission: Submission) -> None:
    """Three steps for five batches in pairs; a schedule by step; full state after a load."""
    given = _trainer(submission)
    with watched(given.optimizer, "step") as steps:
        losses = [given.train_epoch() for _ in range(2)]
    _same_on_both(next(iter(given.model.parameters())).detach(), "copies-drift", "the weights")
    what = f"optimizer steps: two epochs of {_BATCHES} batches in pairs"
    compare(len(steps), 6, what, {"leftover-dropped": 4})
    rate = given.optimizer.param_groups[0]["lr"]
    known = {"schedule-forgotten": _RATE, "schedule-by-batch": _RATE * _DECAY**10}
    compare(rate, _RATE * _DECAY**6, "the learning rate: 6 steps", known)
    require(losses[1] < losses[0], "wrong-value", f"the losses of two epochs are {losses}")
    mean = given.validate()
    _same_on_both(torch.tensor([mean]), "validated-alone", "validate")
    compare(mean, _mean_loss(given), "validate")
    path = str(submission.folder / "checkpoint.pt")
    with watched(torch, "save") as saves:
        given.save_checkpoint(path, 4)
    targets = [str(arguments[1]) for arguments, _ in saves if len(arguments) > 1]
    require(path not in targets, "checkpoint-torn", f"torch.save(…, {path!r})")
    other = _trainer(submission)
    epoch = other.load_checkpoint(path)
    restored = other.optimizer.param_groups[0]["lr"], other.scheduler.last_epoch
    seen = f"rate {restored[0]:.4g} after {restored[1]} steps, expected {rate:.4g} after 6"
    require(is_close(restored, (rate, 6)), "schedule-not-saved", seen)
    compare(epoch, 5, "load_checkpoint of what was saved after epoch 4")
    compare(other.model.module.weight, given.model.module.weight, "the loaded weights")


def _trainer(submission: Submission) -> Any:
    torch.manual_seed(submission.rank)
    train = [_batch(4) for _ in range(_BATCHES)]
    validation = [_batch(4), _batch(1 + submission.rank)]
    settings = submission.code.Settings(rate=_RATE, decay=_DECAY, accumulation=2, max_norm=1.0)
    return submission.code.ProductionTrainer(nn.Linear(3, 2), train, validation, settings)


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 3)
    return inputs, (inputs.sum(1) > 0).long()


def _mean_loss(given: Any) -> float:
    total = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in given.val_batches:
            loss = nn.functional.cross_entropy(given.model.module(inputs), targets)
            total += torch.tensor([float(loss) * len(inputs), len(inputs)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _same_on_both(mine: torch.Tensor, otherwise: str, what: str) -> None:
    both = of_all_ranks(mine)
    seen = f"{what}: rank 0 {both[0].flatten()[:2]}, rank 1 {both[1].flatten()[:2]}"
    require(is_close(*both), otherwise, seen)


@exercise
def test_profiling(submission: Submission) -> None:
    """Shares of known parts, and a trace with their names."""
    calls = {"data": 0, "forward": 0}

    def data() -> None:
        calls["data"] += 1
        time.sleep(0.12)

    def forward() -> None:
        calls["forward"] += 1
        time.sleep(1.2 if calls["forward"] == 1 else 0.01)  # the first call is slow

    trace = submission.folder / "trace.json"
    profilers: list[Any] = []

    class Profile(profile):
        """A profiler that records how it was made."""

        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            profilers.append(named.get("schedule"))

    no_markers = without("no-markers", KeyError, ZeroDivisionError)
    with no_markers, submission.code.replaced("profile", Profile):
        parts = {"data": data, "forward": forward}
        shares = submission.code.profile_steps(parts, 3, str(trace))
    require(any(profilers), "no-schedule", "profile(…) was given no schedule")
    require(trace.exists(), "no-trace", f"there is no {trace.name}")
    shares_text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    seen = (
        f"data sleeps 120 ms, forward 10 ms and 1.2 s in its first call; it returned: {shares_text}"
    )
    require(abs(sum(shares.values()) - 1) < 0.01, "shares-do-not-add-up", seen)
    profiled_first = calls["data"] <= 3 or shares["forward"] >= 0.6
    require(not profiled_first, "first-step-profiled", seen)
    # After the warm-up: without one, torch 2.13 leaves the names out of the trace.
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    require({"data", "forward"} <= names, "no-markers", "the trace names neither part")
    require(shares["data"] > 0.6, "wrong-value", seen)


@exercise
def test_monitor(submission: Submission) -> None:
    """Rows of rank 0 every N steps; alerts for problems."""
    make = submission.code.Monitor
    silent = make(1, 10)
    silent.log(0, torch.tensor(1.0), 100.0)
    require(not silent.rows, "logged-on-every-rank", "rank 1 kept a row")
    watch = make(0, 10)
    loss = torch.tensor(0.5, requires_grad=True) * 1
    for step in range(21):
        watch.log(step, loss, 100.0)
    steps = [row[0] for row in watch.rows]
    require(len(steps) < 21, "logged-every-step", "21 steps gave 21 rows")
    compare(steps, [0, 10, 20], "the steps that were kept of 21, every 10,")
    plain = not any(isinstance(value, torch.Tensor) for row in watch.rows for value in row)
    require(plain, "rows-keep-graphs", "a row holds a tensor")
    text = watch.render()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    wanted = {"train_step": 20.0, "train_loss": 0.5, "train_samples_per_second": 100.0}
    read = {name: float(value) for name, value in lines.items()}
    require(read == wanted, "wrong-value", f"render gave {text!r}")
    _check_writer(submission)
    require(watch.alerts() == [], "false-alarm", f"for a good run it returned {watch.alerts()}")
    for bad in (float("nan"), float("inf")):
        watch.log(30, torch.tensor(bad), 100.0)
        seen = f"the loss is {bad}, and it returned {watch.alerts()}"
        require("loss-not-finite" in watch.alerts(), "nan-unnoticed", seen)
    watch.log(40, torch.tensor(0.4), 30.0)
    seen = f"from 100 to 30 samples/s, and it returned {watch.alerts()}"
    require(watch.alerts() == ["slow"], "slowness-unnoticed", seen)


def _check_writer(submission: Submission) -> None:
    """TensorBoard gets the loss, the rate, and what NVML knows; a machine without NVML is no error."""
    nvml = MagicMock()
    nvml.nvmlDeviceGetUtilizationRates.return_value.gpu = 87
    nvml.nvmlDeviceGetMemoryInfo.return_value.used = 2**30
    nvml.nvmlDeviceGetTemperature.return_value = 61
    writer = MagicMock()
    with patch.dict(sys.modules, {"pynvml": nvml}):
        submission.code.Monitor(0, 10, writer).log(10, torch.tensor(0.5), 100.0)
    written = writer.add_scalar.call_args_list
    wanted = [call("loss", 0.5, 10), call("samples_per_s", 100.0, 10)]
    missing = [scalar for scalar in wanted if scalar not in written]
    require(not missing, "not-in-tensorboard", f"add_scalar was called with {written}")
    gpu = [call("gpu/utilization", 87.0, 10), call("gpu/memory_bytes", 2.0**30, 10)]
    gpu.append(call("gpu/temperature_c", 61.0, 10))
    missing = [scalar for scalar in gpu if scalar not in written]
    require(not missing, "gpu-not-watched", f"add_scalar was called with {written}")
    nvml.nvmlInit.side_effect = OSError("libnvidia-ml.so.1: cannot open shared object file")
    with without("no-nvml-crashes", OSError), patch.dict(sys.modules, {"pynvml": nvml}):
        metrics = submission.code.gpu_metrics()
    require(metrics == {}, "wrong-value", f"without NVML, gpu_metrics returned {metrics}")
