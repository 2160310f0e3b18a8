"""``muster bench precision``: train in fp32, bf16 and fp16; compare speed, memory and loss.

Two more models are unstable on purpose: the gradients of one and the activations of the other are
larger than fp16 can hold (65504).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Bar, amount_text, bar_chart

if TYPE_CHECKING:
    import torch
    from torch import nn

STABLE = "small GPT"
LARGE_GRADIENTS = "large gradients"
LARGE_ACTIVATIONS = "large activations"
LOSS_LIMIT = 0.01  # a relative difference to fp32 up to this counts as equal
FASTER = 1.05  # a precision must be this many times as fast as fp32 to be recommended
UNSTABLE_STEPS = 40
GROW_SCALE_AFTER = 10  # steps; GradScaler's default of 2000 would never be reached here
SAMPLES, FEATURES, WIDTH, LAYERS = 64, 16, 64, 6
TARGET_SIZE = 100.0  # makes gradients whose product with the first loss scale exceeds 65504
GROWTH_PER_LAYER = 8.0  # 8 ** 6 exceeds 65504


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`: a small model on CPUs, whose steps in fp16 take seconds."""
    size = {"batch_size": 2, "blocks": 2} if device == "cpu" else {"batch_size": 8, "blocks": 8}
    if quick:
        return {**size, "steps": 20, "seconds": 0.5}
    return {**size, "steps": 60, "seconds": 2.0}


def measure(
    device: str, steps: int = 60, batch_size: int = 8, blocks: int = 8, seconds: float = 2.0
) -> list[Row]:
    """Train the small GPT in each precision from the same weights on the same texts.

    Then time steps of all precisions in turns, and train the unstable models. Memory is the peak of
    building the model and two steps.
    """
    from torchmuster.bench import small_gpt, timing

    place = timing.device_for(device)
    batches = [batch.to(place) for batch in islice(small_gpt.texts(batch_size), steps)]
    held_out = next(small_gpt.texts(4 * batch_size, seed=1)).to(place)
    build = partial(small_gpt.SmallGpt, blocks=blocks)
    rows = []
    calls = {}
    for precision in precisions(place):
        training = train(place, precision, build, batches)
        two_steps = partial(train, place, precision, build, batches[:2])
        calls[precision] = partial(training.step, batches[0])
        figures = {
            "loss": training.loss(held_out),
            "peak_bytes": timing.memory_of(two_steps, place)[0],
            "skipped": training.skipped,
        }
        labels: dict[str, str | int] = {"model": STABLE, "precision": precision}
        rows.append(Row(labels=labels, figures=figures))
    samples = timing.time_calls(calls, seconds)
    rows = [replace(row, seconds=samples[str(row.labels["precision"])]) for row in rows]
    for model in (LARGE_GRADIENTS, LARGE_ACTIVATIONS):
        for precision in calls:
            rows.append(measure_unstable(place, model, precision))
    return rows


def precisions(device: "torch.device") -> list[str]:
    """Return the precisions that a device can train in; bf16 from NVIDIA's Ampere on."""
    import torch

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return ["fp32", "fp16"]
    return ["fp32", "bf16", "fp16"]


class Training:
    """Weights in float32; autocast and, in fp16, a ``GradScaler``.

    The scaler multiplies the loss, so that small gradients do not become zero in fp16. It leaves a step
    with Inf or NaN out and halves its scale, and doubles it after ``GROW_SCALE_AFTER`` good steps.
    """

    def __init__(
        self, device: "torch.device", precision: str, build: "Callable[[], nn.Module]"
    ) -> None:
        import torch

        torch.manual_seed(0)
        self.device = device
        self.precision = precision
        self.model = build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=precision == "fp16", growth_interval=GROW_SCALE_AFTER
        )
        self.skipped = 0  # steps whose gradients were not finite

    def step(self, *batch: "torch.Tensor") -> float:
        """Make a step, and return its loss."""
        with self.arithmetic():
            loss = self.model(*batch)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)  # leaves a step with Inf or NaN out
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.skipped += 1
        return float(loss.detach())

    def loss(self, *batch: "torch.Tensor") -> float:
        """Return the loss without training."""
        import torch

        with torch.no_grad(), self.arithmetic():
            return float(self.model(*batch))

    def arithmetic(self) -> "torch.autocast":
        """Return the context that computes in this precision."""
        import torch

        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.precision != "fp32")


def train(
    device: "torch.device",
    precision: str,
    build: "Callable[[], nn.Module]",
    batches: "Sequence[torch.Tensor]",
) -> Training:
    """Build a training and make a step with each batch."""
    training = Training(device, precision, build)
    for batch in batches:
        training.step(batch)
    return training


def measure_unstable(device: "torch.device", name: str, precision: str) -> Row:
    """Train an unstable model; return its skipped steps, loss scales and first bad tensor.

    Gradients that overflow are cured by a smaller scale. Activations that overflow are not: the loss is
    not finite whatever the scale is.
    """
    import torch

    training = Training(device, precision, lambda: unstable_model(name))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator).to(device)
    targets = TARGET_SIZE * inputs[:, :1]
    figures = {"first_scale": training.scaler.get_scale()}
    problem = ""
    for step in range(UNSTABLE_STEPS):
        bad_module = first_bad_module(training, inputs, targets)
        skipped = training.skipped
        loss = training.step(inputs, targets)
        if not problem and bad_module is not None:
            problem = f"step {step}: the output of {bad_module} is Inf or NaN"
        elif not problem and training.skipped > skipped:
            problem = f"step {step}: the scaled gradients are Inf or NaN"
    figures["last_scale"] = training.scaler.get_scale()
    figures["skipped"] = training.skipped
    if math.isfinite(loss):
        figures["loss"] = loss
    labels: dict[str, str | int] = {"model": name, "precision": precision}
    return Row(labels=labels, figures=figures, problem=problem)


def unstable_model(name: str) -> "nn.Module":
    """Return a model that computes its loss from inputs and targets."""
    from torch import nn
    from torch.nn.functional import mse_loss

    class Unstable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [FEATURES, *[WIDTH] * LAYERS]
            self.layers = nn.Sequential()
            for width_in, width_out in pairwise(sizes):
                layer = nn.Linear(width_in, width_out)
                if name == LARGE_ACTIVATIONS:
                    nn.init.normal_(layer.weight, std=GROWTH_PER_LAYER * math.sqrt(2 / width_in))
                self.layers.extend([layer, nn.ReLU()])
            self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

        def forward(self, inputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
            return mse_loss(self.head(self.layers(inputs)).float(), targets)

    return Unstable()


def first_bad_module(training: Training, *batch: "torch.Tensor") -> str | None:
    """Return the name of the first module with a non-finite output; None if all are finite.

    "First" is in the order of the forward, so it is the cause, not what it spread to.
    """
    bad: list[str] = []

    def hook_for(name: str) -> "Callable[[nn.Module, object, torch.Tensor], None]":
        def check(module: "nn.Module", inputs: object, output: "torch.Tensor") -> None:
            if not output.isfinite().all():
                bad.append(name)

        return check

    handles = []
    for name, module in training.model.named_modules():
        handles.append(module.register_forward_hook(hook_for(name)))
    training.loss(*batch)
    for handle in handles:
        handle.remove()
    return next(iter(bad), None)


def summarize(rows: Sequence[Row]) -> Report:
    """Recommend the fastest precision whose loss is that of fp32."""
    stable = {str(row.labels["precision"]): row for row in rows if row.seconds}
    fp32 = stable["fp32"]
    usable = [row for row in stable.values() if same_loss(row, fp32)]
    best = min(usable, key=lambda row: row.median_s)
    faster = fp32.median_s / best.median_s
    memory = best.figures["peak_bytes"] / fp32.figures["peak_bytes"]
    name = best.labels["precision"]
    if best is fp32 or faster < FASTER:
        conclusion = "No smaller precision trains the small GPT faster than fp32 here."
        advice = "train in fp32 (train.precision: fp32) on this device."
    else:
        conclusion = (
            f"{name} trains the small GPT {faster:.2g} times as fast as fp32, with "
            f"{memory:.0%} of its peak memory, and its loss is within {LOSS_LIMIT:.0%}."
        )
        advice = f"set train.precision: {name}, and compare the loss of your own model with fp32."

    def speed_up(row: Row) -> str:
        return f"{fp32.median_s / row.median_s:.2f}"

    def loss_to_fp32(row: Row) -> str:
        return f"{row.figures['loss'] / fp32.figures['loss'] - 1:+.2%}"

    bars = []
    for row in stable.values():
        text = f"{amount_text(row.median_s, 's')}, {amount_text(row.figures['peak_bytes'], 'B')}"
        bars.append(Bar(name=str(row.labels["precision"]), parts={"": row.median_s}, label=text))
    chart = bar_chart("Small GPT: time of a training step, and peak memory", "s", bars)
    return Report(
        conclusion=conclusion,
        advice=advice,
        tables=[
            show.table(
                "The small GPT, trained on the same texts",
                list(stable.values()),
                show.label("precision"),
                show.TIME,
                ("speed-up", speed_up),
                show.amount("peak memory", "peak_bytes", "B"),
                ("loss", lambda row: f"{row.figures['loss']:.4f}"),
                ("loss to fp32", loss_to_fp32),
                show.amount("skipped", "skipped", ""),
            ),
            show.table(
                f"Unstable models, {UNSTABLE_STEPS} steps (no speed)",
                [row for row in rows if not row.seconds],
                show.label("model"),
                show.label("precision"),
                show.amount("skipped steps", "skipped", ""),
                ("loss scale", loss_scale),
                ("last loss", last_loss),
            ),
        ],
        charts={"precision": chart},
        findings=[problem_note(row) for row in rows if row.problem],
    )


def same_loss(row: Row, fp32: Row) -> bool:
    """Return whether the held-out loss equals that of fp32; a NaN does not."""
    return abs(row.figures["loss"] / fp32.figures["loss"] - 1) <= LOSS_LIMIT


def loss_scale(row: Row) -> str:
    """Return the first and the last loss scale; only fp16 has one."""
    if row.labels["precision"] != "fp16":
        return "-"
    return f"{row.figures['first_scale']:g} to {row.figures['last_scale']:g}"


def last_loss(row: Row) -> str:
    """Return the loss of the last step of an unstable model."""
    return f"{row.figures['loss']:.4g}" if "loss" in row.figures else "not finite"


def problem_note(row: Row) -> Finding:
    """Return the note of the first Inf or NaN of an unstable model."""
    fix = "GradScaler halves its scale after such a step; bf16 needs no scale"
    if "loss" not in row.figures:
        fix = "train in bf16, which has the range of float32, or normalize the activations"
    return Finding(
        name="precision-overflow",
        status=Status.NOTE,
        what=f"{row.labels['model']} in {row.labels['precision']}: {row.problem}",
        why="fp16 holds numbers up to 65504",
        fix=fix,
    )
