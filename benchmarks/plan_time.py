"""Compare step times that ``muster plan`` predicts with real gloo runs on this machine.

    python benchmarks/plan_time.py --kept /tmp/plan-time --out docs/measured/plan-time.md
    python benchmarks/plan_time.py --quick

The machine is measured once, and one constant each is fitted to three real runs (the best of two rounds) of one medium-size model (one
process, DDP and FSDP2 on 2 ranks), which are not evaluated, as in ``muster plan --calibrate``. Then every setting is trained with one
process, DDP and FSDP2 on 2 ranks, and every second one also on 4 ranks. A step's time is that of the slowest rank, and the best of all
steps of all rounds; the configurations are interleaved, and those whose two best rounds differ by more than 10 % are run a third time.
Measurements and traces are stored in a folder, so that an interrupted run can be resumed; more --rounds add to them. Run nothing else at
the same time; a round takes twenty minutes on two cores.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.proof import verification
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.timing import calibration, fitting
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.calibration import Calibration
from torchmuster.plan.timing.fitting import RealRun
from torchmuster.plan.tracing.tracer import Tracer
from torchmuster.train.strategies.sharding import ShardLayout

_SHAPES = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 4000,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    },
    "wide llama": {
        "model_type": "llama",
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 6000,
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "n_positions": 512,
    },
    "tied qwen2": {
        "model_type": "qwen2",
        "vocab_size": 16000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}
_CALIBRATION_SHAPE = {
    "model_type": "llama",
    "vocab_size": 6000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
}
_BATCHES = ((128, 4), (256, 4), (128, 8))  # tokens of a sample, samples of a rank
_WAYS = (("single", 1, 1), ("ddp", 2, 1), ("fsdp", 1, 2))  # strategy, copies, shards
_WIDER_WAYS = (("ddp", 4, 1), ("fsdp", 1, 4))
_QUICK_SETTINGS, _QUICK_STEPS = 2, 3
# A machine that others share: a best step that no other round came near may be a worse one than the machine has.
_MOST_ROUNDS = 3
_NEAR = 1.1
_FIT_STEPS = 12  # of the runs that constants are fitted to: everything hangs on them


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and what a rank computes at once."""

    shape: str
    sequence_length: int
    micro_batch_size: int

    @property
    def words(self) -> str:
        """Say what it is."""
        return f"{self.shape}, {self.micro_batch_size} x {self.sequence_length}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train a setting."""

    setting: Setting
    candidate: Candidate

    @property
    def way(self) -> str:
        """Say how it is spread."""
        return f"{self.candidate.strategy} {self.candidate.layout.ranks}"


def settings() -> list[Setting]:
    """Return all settings; the first of each shape come first."""
    return [
        Setting(shape=shape, sequence_length=length, micro_batch_size=size)
        for length, size in _BATCHES
        for shape in _SHAPES
    ]


def cases(setting: Setting, *, wider: bool) -> Iterator[Case]:
    """Yield the ways to train a setting; ``wider`` ones have more ranks than most machines for tests have cores."""
    for strategy, copies, shards in (*_WAYS, *(_WIDER_WAYS if wider else ())):
        candidate = Candidate(
            strategy=strategy,  # type: ignore[arg-type]
            layout=ShardLayout(copies=copies, shards=shards),
            micro_batch_size=setting.micro_batch_size,
        )
        yield Case(setting=setting, candidate=candidate)


class Bench:
    """The machine as it was measured, the traces, and where models are described."""

    def __init__(self, folder: Path, tracer: Tracer, measured: Calibration) -> None:
        self._folder = folder
        self._tracer = tracer
        self.calibration = measured
        self._seen = folder / "steps.json"
        self._best: dict[str, float] = (
            json.loads(self._seen.read_text()) if self._seen.is_file() else {}
        )

    def work(self, setting: Setting) -> Work:
        """Return what is trained, described in a folder."""
        place = self._folder / setting.shape.replace(" ", "-")
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(
            json.dumps(_SHAPES.get(setting.shape, _CALIBRATION_SHAPE)), encoding="utf-8"
        )
        return Work(model_name_or_path=str(place), sequence_length=setting.sequence_length)

    def records(self, case: Case) -> tuple[TraceRecord, ...]:
        """Return the traces of a case."""
        requests = memory.trace_requests(self.work(case.setting), case.candidate, kernels="cpu")
        found = self._tracer.records(requests)
        refused = [one for one in found if not isinstance(one, TraceRecord)]
        if refused:
            raise SystemExit(f"{case.setting.words}, {case.way}: {refused[0].what}")
        return tuple(one for one in found if isinstance(one, TraceRecord))

    def hardware(self, case: Case) -> Hardware:
        """Return this machine as it was measured."""
        plain = here.hardware_here(ranks=case.candidate.layout.ranks)
        return calibration.hardware_as_measured(self.calibration, plain)

    def predicted_s(self, case: Case) -> float:
        """Foretell a step."""
        hardware = self.hardware(case)
        rates = calibration.calibrated_rates(self.calibration, hardware)
        found = timing.predict_time(
            self.records(case), case.candidate, hardware=hardware, rates=rates
        )
        return found.step_s

    def measured_s(self, case: Case, turn: int, steps: int) -> float:
        """Run real steps, and return the best; what was seen in this turn before is kept."""
        key = f"{turn} {steps} {case.setting.words}, {case.way}"
        if key not in self._best:
            ranks = verification.run_real_steps(
                self.work(case.setting),
                case.candidate,
                ranks=case.candidate.layout.ranks,
                steps=steps,
            )
            slowest = (max(times) for times in zip(*(one.step_s for one in ranks), strict=True))
            self._best[key] = min(slowest)
            self._seen.write_text(json.dumps(self._best, indent=1) + "\n", encoding="utf-8")
        return self._best[key]

    def fit(self, case: Case, step_s: float) -> None:
        """Fit one constant to a run."""
        run = RealRun(
            records=self.records(case),
            candidate=case.candidate,
            hardware=self.hardware(case),
            step_s=step_s,
            words=f"{case.setting.words} {fitting.describe_fit(case.candidate)}",
        )
        self.calibration = fitting.with_fit(self.calibration, run)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was said and what was seen."""

    case: Case
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """By which part it was foretold wrongly."""
        return self.predicted_s / self.measured_s - 1.0


def measure_all(bench: Bench, chosen: Sequence[Case], rounds: int, steps: int) -> list[float]:
    """Return the best step of each case. All are run once in each round, and then again those whose best nothing came near."""
    times: list[list[float]] = [[] for _ in chosen]
    for turn in range(max(rounds, _MOST_ROUNDS)):
        for case, seen in zip(chosen, times, strict=True):
            if turn >= rounds and (len(seen) < 2 or sorted(seen)[1] <= _NEAR * min(seen)):
                continue
            seen.append(bench.measured_s(case, turn, steps))
            print(
                f"round {turn + 1}: {case.setting.words}, {case.way}: {seen[-1]:.4f} s", flush=True
            )
    return [min(seen) for seen in times]


def ranking(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many pairs of configurations of a setting are ranked correctly, and how many differ by more than 10 %."""
    right = pairs = 0
    for _, group in itertools.groupby(rows, key=lambda row: row.case.setting):
        for one, two in itertools.combinations(list(group), 2):
            seen, said = (
                _speed(one.case, first) / _speed(two.case, second)
                for first, second in (
                    (one.measured_s, two.measured_s),
                    (one.predicted_s, two.predicted_s),
                )
            )
            if max(seen, 1 / seen) > 1.1:
                pairs += 1
                right += (seen > 1) == (said > 1)
    return right, pairs


def _speed(case: Case, step_s: float) -> float:
    return case.candidate.global_batch_size / step_s


def page(rows: Sequence[Row], measured: Calibration, options: argparse.Namespace) -> str:
    """Return the result as the text of a page."""
    errors = [abs(row.error) for row in rows]
    right, pairs = ranking(rows)
    lines = [
        "# Step time: predicted and measured",
        "",
        "Written by",
        "",
        "    python benchmarks/plan_time.py --kept /tmp/plan-time --out docs/measured/plan-time.md",
        "",
        f"Measured on {date.today().isoformat()} on {platform.processor() or platform.machine()} with {os.cpu_count()} cores and gloo: "
        f"{len(rows)} runs of {len({row.case.setting for row in rows})} settings. A measured time is the best of "
        f"{options.rounds} x {options.steps} steps, or of {_MOST_ROUNDS} x {options.steps} if the rounds differed by more than 10 %. "
        f"Source of the rates: {measured.source}.",
        "",
        "The fit gives these shares of the measured rates. "
        + " ".join(
            f"With {number} {'rank' if number == 1 else 'ranks'}: {one.memory:.2f} of the memory bandwidth, "
            f"{one.compute:.2f} of the rate of matrix products, {one.sharded_communication:.2f} of the rate of fsdp collectives."
            for number, one in measured.by_ranks.items()
        ),
        "",
        f"The mean error is **{statistics.mean(errors):.1%}**, the median {statistics.median(errors):.1%}, the worst "
        f"**{max(errors):.1%}**. Of {pairs} pairs of configurations that differ by more than 10 %, {right} are ranked "
        f"correctly ({right / max(pairs, 1):.1%}).",
        "",
        "| setting | configuration | measured | predicted | error |",
        "|---|---|---|---|---|",
        *(
            f"| {row.case.setting.words} | {row.case.way} | {row.measured_s * 1e3:.0f} ms "
            f"| {row.predicted_s * 1e3:.0f} ms | {row.error:+.1%} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=len(_SHAPES) * len(_BATCHES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two settings, to see that it works")
    parser.add_argument("--kept", type=Path, help="folder of a run that can be gone on with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.settings, options.steps = _QUICK_SETTINGS, _QUICK_STEPS
    return options


def compare(folder: Path, options: argparse.Namespace) -> str:
    """Measure, foretell, and return both as a page."""
    chosen = [
        case
        for number, setting in enumerate(settings()[: options.settings])
        for case in cases(setting, wider=number % 2 == 0)
    ]
    middle = Setting(shape="calibration", sequence_length=192, micro_batch_size=8)
    measured = calibration.saved_calibration(folder)
    if measured is None or measured.machine != platform.node():
        measured = calibration.measure_calibration(
            [1, 2, 4], say=lambda text: print(text, flush=True)
        )
        calibration.save_calibration(measured, folder)
    with Tracer(cache=folder / "traces") as tracer:
        bench = Bench(folder, tracer, measured)
        fitted_to = list(cases(middle, wider=False))
        best_s = measure_all(bench, fitted_to, fitting.TURNS, _FIT_STEPS)
        for case, step_s in zip(fitted_to, best_s, strict=True):
            bench.fit(case, step_s)
        seen = measure_all(bench, chosen, options.rounds, options.steps)
        rows = []
        for case, took in zip(chosen, seen, strict=True):
            rows.append(Row(case=case, measured_s=took, predicted_s=bench.predicted_s(case)))
            print(f"{case.setting.words}, {case.way}: {rows[-1].error:+.1%}", flush=True)
        return page(rows, bench.calibration, options)


def main() -> None:
    """Compare, and show or write the page."""
    options = _asked()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = (options.kept or Path(place)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        text = compare(folder, options)
    print(text)
    print(f"took {time.monotonic() - begun:.0f} s", flush=True)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
