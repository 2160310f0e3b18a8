"""The tests of the lab gpu-basics: pytest tests/, or muster lab check."""

import sys
import time
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from torchmuster.labs.testing import (
    Operations,
    SavedBytes,
    Submission,
    compare,
    exercise,
    is_close,
    replaced,
    require,
)

_ITERATIONS, _SIZE = 10, 8
_READING_S = 1e-6  # avoids a division by zero
_MEASURED = 0.02


class _Device:
    """An asynchronous fake device: each product takes 1 s, and finishes on synchronization."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.products = self.given = self.looks = 0

    def saw(self, operation: str, _: Any) -> None:
        if operation in ("mm", "bmm", "addmm"):
            self.products += 1
            self.given += 1

    def wait(self, _: Any = None) -> None:
        self.now_s += self.given
        self.given = 0

    def clock(self) -> float:
        self.looks += 1
        self.now_s += _READING_S
        return self.now_s


@exercise
def test_benchmark(submission: Submission) -> None:
    """On a device that takes one second per product, the result must be one second."""
    device = _Device()
    with (
        submission.code.replaced("wait_for", device.wait),
        replaced(time, "perf_counter", device.clock),
        Operations(device.saw),
    ):
        result = submission.code.benchmark_matmul(torch.device("cpu"), _SIZE, _ITERATIONS)
    seconds, rate = float(result.seconds), float(result.tflops)
    require(device.looks >= 2, "wrong-clock", f"time.perf_counter was read {device.looks} times")
    seen = f"each product took 1 s; it returned {seconds:.3g} s"
    require(seconds > 0.01, "no-synchronize", seen)
    require(device.products > _ITERATIONS, "no-warm-up", f"{device.products} products in total")
    is_total = is_close(seconds, _ITERATIONS, rtol=_MEASURED)
    require(is_total or seconds < 1.05, "warm-up-timed", seen)
    what = "a product that takes 1 s"
    compare(seconds, 1.0, what, {"total-not-mean": _ITERATIONS}, rtol=_MEASURED)
    what = f"operations: a product of {_SIZE} x {_SIZE}"
    operations, half = 2 * _SIZE**3, {"flops-halved": _SIZE**3}
    compare(rate * 1e12 * seconds, operations, what, half, rtol=_MEASURED)


@exercise
def test_measurements(submission: Submission) -> None:
    """An outlier does not count; a speed-up is above 1 if it is faster."""
    usual = submission.code.typical_seconds([1.0, 1.1, 9.0, 0.9, 1.0])
    what = "typical_seconds of 1.0 1.1 9.0 0.9 1.0"
    compare(usual, 1.0, what, {"outlier-decides": 2.6})
    given = submission.code.speedups({128: 2.0, 512: 8.0}, {128: 4.0, 512: 1.0})
    known = {"speedup-upside-down": [2.0, 0.125]}
    compare([given[128], given[512]], [0.5, 8.0], "speedups from 2, 8 s to 4, 1 s", known)
    _check_plot(submission)


def _check_plot(submission: Submission) -> None:
    """Run the plot with a stand-in for matplotlib, which may not be installed."""
    pyplot = MagicMock()
    figure, axes = pyplot.subplots.return_value = MagicMock(), MagicMock()
    path = str(submission.folder / "speedup.png")
    package = MagicMock(pyplot=pyplot)
    with patch.dict(sys.modules, {"matplotlib": package, "matplotlib.pyplot": pyplot}):
        submission.code.plot_speedups({128: 0.5, 512: 8.0}, path)
    calls: dict[str, tuple[Any, ...]] = {}
    for name, arguments, _ in [*pyplot.method_calls, *figure.method_calls, *axes.method_calls]:
        calls[name.removeprefix("set_")] = arguments
    require("savefig" in calls, "plot-not-saved", "savefig was not called")
    require(calls["savefig"][0] == path, "plot-not-saved", f"saved as {calls['savefig'][0]}")
    has_titles = "set" in calls or {"xlabel", "ylabel"} <= calls.keys()
    require(has_titles, "axes-without-titles", f"called: {', '.join(calls)}")
    require("plot" in calls, "wrong-value", "plot was not called")
    sizes, speedups = calls["plot"][:2]
    compare([*sizes, *speedups], [128, 512, 0.5, 8.0], "what was drawn")


@exercise
def test_memory(submission: Submission) -> None:
    """Each kind of bytes, of a step with Adam."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs, targets = torch.randn(8, 16), torch.randn(8, 4)
    weights = sum(weight.numel() * 4 for weight in model.parameters())
    with SavedBytes(model.parameters()) as saved:
        nn.functional.mse_loss(model(inputs), targets)
    with SavedBytes([]) as with_weights:
        nn.functional.mse_loss(model(inputs), targets)
    optimizer = torch.optim.Adam(model.parameters())
    stages = submission.code.training_memory(model, inputs, targets, nn.MSELoss(), optimizer)
    compare(stages["weights"], weights, '"weights"', {"elements-not-bytes": weights // 4})
    compare(stages["gradients"], weights, '"gradients"')
    seen = f'"optimizer" is {stages["optimizer"]}; Adam stores two values per weight'
    require(stages["optimizer"] > 0, "state-before-step", seen)
    require(abs(stages["optimizer"] - 2 * weights) <= 64, "wrong-value", seen)
    known = {
        "weights-as-activations": with_weights.total,
        "activations-twice": saved.with_repeats,
    }
    compare(stages["activations"], saved.total, '"activations"', known)


@exercise
def test_analysis(submission: Submission) -> None:
    """The saving of 16 bits, and the size that saturates a device."""
    stages = {"weights": 100, "activations": 400, "gradients": 100, "optimizer": 200}
    share = submission.code.saving_in_16_bits(stages)
    what = "saving_in_16_bits, with 400 of 800 bytes activations,"
    compare(share, 0.25, what, {"everything-halves": 0.5})
    rates = {128: 1.0, 512: 6.0, 1024: 9.3, 2048: 9.9, 4096: 10.0}
    size = submission.code.sufficient_size(rates)
    compare(size, 1024, f"sufficient_size of {rates}", {"best-not-sufficient": 4096})
