"""``muster bench memory``: memory of training by stage, and what recomputing blocks saves and costs."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torchmuster.bench.result import Report, Row, Table
from torchmuster.pages.charts import Bar, amount_text, bar_chart

if TYPE_CHECKING:
    import torch
    from torch import nn

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

StageBytes = tuple[str, int, int, int]  # name, bytes before, peak in it, bytes after


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
        recorder = StageRecorder(place)
        with recorder:
            model = small_gpt.SmallGpt(width=width, blocks=blocks).to(place)
            model.recompute_every = every
            training = Training(model, precision)
            training.step(batch, recorder)
            training.step(batch, recorder)
        second_step = recorder.stages[-3:]
        for stage, before, peak, after in second_step:
            row = Row(labels={"case": name, "recompute_every": every, "stage": stage})
            row.figures.update(before_bytes=before, peak_bytes=peak, after_bytes=after)
            rows.append(row)
        calls[name] = partial(training.step, batch, StageRecorder(place))
        figures[name] = {
            "peak_bytes": max(peak for _, _, peak, _ in second_step),
            "weights_gradients_states_bytes": training.fixed_bytes(),
        }
    samples = timing.time_calls(calls, seconds)
    for name, _, every in CASES:
        labels: dict[str, str | int] = {"case": name, "recompute_every": every, "stage": WHOLE_STEP}
        rows.append(Row(labels=labels, seconds=samples[name], figures=figures[name]))
    return rows


class Training:
    """A model with AdamW, whose steps report their stages.

    Weights are float32 in both precisions; bf16 computes with autocast, so it has smaller activations
    and the same weights, gradients and states.
    """

    def __init__(self, model: "nn.Module", precision: str) -> None:
        import torch

        self.model = model
        self.precision = precision
        self.optimizer = torch.optim.AdamW(model.parameters())

    def step(self, batch: "torch.Tensor", recorder: "StageRecorder") -> None:
        """Make a step with its stages."""
        import torch

        with recorder.stage("forward"):
            reduced = self.precision == "bf16"
            with torch.autocast(batch.device.type, torch.bfloat16, enabled=reduced):
                loss = self.model(batch)
        with recorder.stage("backward"):
            loss.backward()
        with recorder.stage("optimizer step"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fixed_bytes(self) -> int:
        """Return the bytes of weights, gradients and AdamW's two moments, whatever the batch is."""
        return 4 * sum(parameter.nbytes for parameter in self.model.parameters())


class StageRecorder:
    """Records live bytes before, during and after each stage, while it is entered as a context.

    On a GPU these are the allocator's figures. On a CPU the profiler reports every allocation.
    """

    def __init__(self, device: "torch.device") -> None:
        self.device = device
        self.stages: list[StageBytes] = []
        self._recording = False
        self._begin_bytes = 0

    def __enter__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._recording = True
        if self.device.type != "cpu":
            self._begin_bytes = int(torch.accelerator.memory_allocated(self.device))
        else:
            self._profile = profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )
            self._profile.start()

    def __exit__(self, *error: object) -> None:
        self._recording = False
        if self.device.type == "cpu":
            self._profile.stop()
            self._read_profile()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record a stage; does nothing outside the context."""
        import torch
        from torch.profiler import record_function

        if not self._recording:
            yield
        elif self.device.type == "cpu":
            with record_function(f"stage: {name}"):
                yield
        else:
            accelerator = torch.accelerator
            before = int(accelerator.memory_allocated(self.device)) - self._begin_bytes
            accelerator.reset_peak_memory_stats(self.device)
            yield
            peak = int(accelerator.max_memory_allocated(self.device)) - self._begin_bytes
            after = int(accelerator.memory_allocated(self.device)) - self._begin_bytes
            self.stages.append((name, before, peak, after))

    def _read_profile(self) -> None:
        """Add up the allocations before and in each stage.

        The profiler reports each allocation with its time, and each stage as a range of time.
        """
        from torchmuster.bench import timing

        allocations = sorted(timing.allocations(self._profile))
        for name, begin_ns, end_ns in timing.recorded_ranges(self._profile, "stage: "):
            before = sum(size for time_ns, size in allocations if time_ns < begin_ns)
            live = peak = before
            for time_ns, size in allocations:
                if begin_ns <= time_ns < end_ns:
                    live += size
                    peak = max(peak, live)
            self.stages.append((name, before, peak, live))


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
    return Report(
        conclusion=conclusion,
        advice=advice,
        tables=[
            Table(
                title="Stages of a step",
                head=("case", "stage", "before", "peak", "after"),
                rows=[stage_cells(row) for row in stages if not row.labels["recompute_every"]],
            ),
            Table(
                title="Whole step",
                head=("case", "peak", "step", "saved"),
                rows=[step_cells(row, plain) for row in steps],
            ),
        ],
        charts={"memory-by-stage": stage_chart(stages), "memory-recomputed": step_chart(steps)},
    )


def stage_cells(row: Row) -> tuple[str, ...]:
    """Return a row of the first table."""
    figures = [
        amount_text(row.figures[f"{time}_bytes"], "B") for time in ("before", "peak", "after")
    ]
    return (str(row.labels["case"]), str(row.labels["stage"]), *figures)


def step_cells(row: Row, plain: Row) -> tuple[str, ...]:
    """Return a row of the second table."""
    saved = 1 - row.figures["peak_bytes"] / plain.figures["peak_bytes"]
    peak = amount_text(row.figures["peak_bytes"], "B")
    return str(row.labels["case"]), peak, amount_text(row.median_s, "s"), f"{saved:.0%}"


def stage_chart(stages: Sequence[Row]) -> str:
    """Draw the peak of each stage in fp32 and bf16."""
    bars = []
    for row in stages:
        if not row.labels["recompute_every"]:
            name = f"{row.labels['case']}: {row.labels['stage']}"
            bars.append(Bar(name=name, parts={"": row.figures["peak_bytes"]}))
    return bar_chart("Small GPT: peak memory by stage of a training step", "B", bars)


def step_chart(steps: Sequence[Row]) -> str:
    """Draw the peak of a step by recompute frequency, with its time."""
    bars = []
    for row in steps:
        peak = row.figures["peak_bytes"]
        label = f"{amount_text(peak, 'B')}, {amount_text(row.median_s, 's')}"
        bars.append(Bar(name=str(row.labels["case"]), parts={"": peak}, label=label))
    return bar_chart("Small GPT: peak memory and time of a training step", "B", bars)
