"""``muster bench memory``: memory of training by stage, and what recomputing blocks saves and costs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row
from torchmuster.pages.charts import Bar, amount_text, bar_chart

if TYPE_CHECKING:
    import torch

    from torchmuster.bench.small_gpt import SmallGpt

# Name, precision, and N of recomputing every N-th block; 0: no block.
CASES = (
    ("fp32", "fp32", 0),
    ("bf16", "bf16", 0),
    ("fp32, every 4th block recomputed", "fp32", 4),
    ("fp32, every 2nd block recomputed", "fp32", 2),
    ("fp32, every block recomputed", "fp32", 1),
)
WHOLE_STEP = "step"
FEWER_BYTES = 0.05  # a share of the peak memory that is worth a recommendation


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`."""
    return {"seconds": 0.5 if quick else 2.0}


def measure(
    device: str, batch_size: int = 16, blocks: int = 8, width: int = 128, seconds: float = 2.0
) -> list[Row]:
    """Train the small GPT in fp32, in bf16, and in fp32 with every N-th block recomputed.

    A case has a row for each stage of its second step, when the optimizer has its states, and a row
    for the whole step with its time. Bytes count from before the model was built.
    """
    import torch

    from torchmuster.bench import small_gpt, timing

    place = timing.device_for(device)
    batch = next(small_gpt.texts(batch_size)).to(place)
    rows = []
    calls = {}
    figures: dict[str, dict[str, float]] = {}
    for name, precision, every in CASES:
        torch.manual_seed(0)
        training = Training(batch, precision)
        build = partial(training.build, width=width, blocks=blocks, recompute_every=every)
        _, live = timing.memory_of(build, place)
        training.step()  # creates the states of the optimizer, and frees the gradients
        live += training.states_bytes()
        peaks = []
        for stage, call in training.stages().items():
            peak, change = timing.memory_of(call, place)
            row = Row(labels={"case": name, "recompute_every": every, "stage": stage})
            row.figures.update(before_bytes=live, peak_bytes=live + peak, after_bytes=live + change)
            rows.append(row)
            peaks.append(live + peak)
            live += change
        calls[name] = training.step
        figures[name] = {
            "peak_bytes": max(peaks),
            "weights_gradients_states_bytes": training.fixed_bytes(),
        }
    samples = timing.time_calls(calls, seconds)
    for name, _, every in CASES:
        labels: dict[str, str | int] = {"case": name, "recompute_every": every, "stage": WHOLE_STEP}
        rows.append(Row(labels=labels, seconds=samples[name], figures=figures[name]))
    return rows


class Training:
    """A model with AdamW, whose step has three stages.

    Weights are float32 in both precisions; bf16 computes with autocast, so it has smaller activations
    and the same weights, gradients and states.
    """

    model: "SmallGpt"
    optimizer: "torch.optim.Optimizer"
    loss: "torch.Tensor"

    def __init__(self, batch: "torch.Tensor", precision: str) -> None:
        self.batch = batch
        self.precision = precision

    def build(self, width: int, blocks: int, recompute_every: int) -> None:
        """Create the model and the optimizer."""
        import torch

        from torchmuster.bench import small_gpt

        self.model = small_gpt.SmallGpt(width=width, blocks=blocks).to(self.batch.device)
        self.model.recompute_every = recompute_every
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def stages(self) -> dict[str, Callable[[], None]]:
        """Return the stages of a step, in order."""
        return {"forward": self.forward, "backward": self.backward, "optimizer step": self.update}

    def step(self) -> None:
        """Make a step."""
        for stage in self.stages().values():
            stage()

    def forward(self) -> None:
        """Compute the loss."""
        import torch

        reduced = self.precision == "bf16"
        with torch.autocast(self.batch.device.type, torch.bfloat16, enabled=reduced):
            self.loss = self.model(self.batch)

    def backward(self) -> None:
        """Compute the gradients; the activations are freed."""
        self.loss.backward()  # type: ignore[no-untyped-call]
        del self.loss

    def update(self) -> None:
        """Change the weights, and free the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states_bytes(self) -> int:
        """Return the bytes of the optimizer's states."""
        states = 0
        for tensors in self.optimizer.state.values():
            states += sum(tensor.nbytes for tensor in tensors.values())
        return states

    def fixed_bytes(self) -> int:
        """Return the bytes of weights, gradients and AdamW's two moments, whatever the batch is."""
        return 4 * sum(parameter.nbytes for parameter in self.model.parameters())


def summarize(rows: Sequence[Row]) -> Report:
    """Name the stage with the peak, and the recompute frequency with the lowest peak."""
    steps = [row for row in rows if row.labels["stage"] == WHOLE_STEP]
    plain = steps[0]
    recomputed = [row for row in steps if row.labels["recompute_every"]]
    lowest = min(recomputed, key=lambda row: row.figures["peak_bytes"])
    saved = 1 - lowest.figures["peak_bytes"] / plain.figures["peak_bytes"]
    slower = lowest.median_s / plain.median_s - 1
    fixed = plain.figures["weights_gradients_states_bytes"] / plain.figures["peak_bytes"]
    conclusion = (
        f"The small GPT needs {amount_text(plain.figures['peak_bytes'], 'B')} in fp32; weights, "
        f"gradients and optimizer states are {fixed:.0%} of it. With {lowest.labels['case']}, the "
        f"peak is {saved:.0%} lower and the time of a step changes by {slower:+.0%}."
    )
    advice = (
        f"if your model does not fit, set train.activation_checkpointing: "
        f"{lowest.labels['recompute_every']}."
    )
    if saved < FEWER_BYTES:
        advice = "do not recompute blocks at this batch size; it saves almost nothing."
    stages = [row for row in rows if row.labels["stage"] != WHOLE_STEP]
    plain_stages = [row for row in stages if not row.labels["recompute_every"]]

    def saved_by(row: Row) -> str:
        return f"{1 - row.figures['peak_bytes'] / plain.figures['peak_bytes']:.0%}"

    stage_bars = []
    for row in plain_stages:
        name = f"{row.labels['case']}: {row.labels['stage']}"
        stage_bars.append(Bar(name=name, parts={"": row.figures["peak_bytes"]}))
    step_bars = []
    for row in steps:
        peak = row.figures["peak_bytes"]
        text = f"{amount_text(peak, 'B')}, {amount_text(row.median_s, 's')}"
        step_bars.append(Bar(name=str(row.labels["case"]), parts={"": peak}, label=text))
    return Report(
        conclusion=conclusion,
        advice=advice,
        tables=[
            show.table(
                "Stages of a step",
                plain_stages,
                show.label("case"),
                show.label("stage"),
                show.amount("before", "before_bytes", "B"),
                show.amount("peak", "peak_bytes", "B"),
                show.amount("after", "after_bytes", "B"),
            ),
            show.table(
                "Whole step",
                steps,
                show.label("case"),
                show.amount("peak", "peak_bytes", "B"),
                show.TIME,
                ("saved", saved_by),
            ),
        ],
        charts={
            "memory-by-stage": bar_chart(
                "Small GPT: peak memory by stage of a training step", "B", stage_bars
            ),
            "memory-recomputed": bar_chart(
                "Small GPT: peak memory and time of a training step", "B", step_bars
            ),
        },
    )
