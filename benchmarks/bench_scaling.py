"""Forecast the speed on 4 ranks from 1 and 2 ranks, and measure it, for several trainings.

    python benchmarks/bench_scaling.py --out docs/measured/bench-scaling.md

The forecast is that of ``muster bench scaling``, with its own probe and rules. Each setting is measured in passes over 1, 2 and 4
ranks. Run nothing else at the same time; with 2 cores, 4 ranks share them.
"""

import argparse
import platform
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Literal

from torchmuster.bench import scaling
from torchmuster.bench.scaling import MODES, OnRanks, ScalingStudy, checked_forecasts, scaled
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.plan.job import Work

HERE = str(Path(__file__).parent)
BAR = 0.15
GPT = {"sequence_length": 128, "loss": "language_model", "folder": HERE}
SMALL = Work(build="torchmuster.bench.probes.small_gpt:make_small_gpt", **GPT)  # type: ignore[arg-type]
WIDE = Work(build="scaling_workloads:wide_gpt", **GPT)  # type: ignore[arg-type]
FAT = Work(build="scaling_workloads:fat_layers", dataset="scaling_workloads:vectors", folder=HERE)
PICTURES = Work(
    build="scaling_workloads:pictures_model", dataset="scaling_workloads:pictures", folder=HERE
)
SETTINGS: dict[str, tuple[Work, Literal["ddp", "fsdp"], int, int | None]] = {
    "small GPT, 8 samples, ddp": (SMALL, "ddp", 8, None),
    "small GPT, 8 samples, fsdp": (SMALL, "fsdp", 8, None),
    "wide GPT, 8 samples in micro-batches of 2, ddp": (WIDE, "ddp", 8, 2),
    "many weights, 64 samples, ddp": (FAT, "ddp", 64, None),
    "pictures, 32 samples, ddp": (PICTURES, "ddp", 32, None),
}


def study_of(name: str, *, rounds: int, passes: int) -> ScalingStudy:
    """Return the study of a setting, as the command would make it here."""
    work, strategy, whole, micro = SETTINGS[name]
    ranks = (1, 2, 4)
    cores = usable_cores().value
    threads = max(1, cores // max(ranks))
    return ScalingStudy(
        work=work,
        strategy=strategy,
        precision="fp32",
        ranks=ranks,
        whole=whole,
        micro_batch_size=micro,
        workers=0,
        device="cpu",
        threads=threads,
        slots=max(1, cores // threads),
        rounds=rounds,
        passes=passes,
    )


def rows_of(name: str, study: ScalingStudy, measured: dict[int, OnRanks]) -> list[str]:
    """Return the lines of the table of speeds for one setting."""
    rows = []
    for mode in MODES:
        for ranks in study.ranks[1:]:
            one = scaled(study, measured, ranks, mode)
            parts = (f"{part / one.step_s.median:.0%}" for part in one.parts_s.values())
            rows.append(
                f"| {name} | {mode} | {ranks} | {one.throughput.median:.1f} | "
                f"{one.speed_up.median:.2f} ({one.speed_up.low:.2f} to {one.speed_up.high:.2f}) | "
                f"{one.efficiency.median:.0%} | {' | '.join(parts)} |"
            )
    return rows


def main() -> None:
    """Measure every setting, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="settings by their place, from 0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    forecasts, speeds, errors = [], [], []
    for place, name in enumerate(SETTINGS):
        if options.only and place not in options.only:
            continue
        print(name, flush=True)
        study = study_of(name, rounds=options.rounds, passes=options.passes)
        measured = scaling.measure_scaling(study, say=lambda text: print(f"  {text}", flush=True))
        speeds += rows_of(name, study, measured)
        for one in checked_forecasts(study, measured):
            errors.append(abs(one.error))
            truth = one.measured.throughput
            forecasts.append(
                f"| {name} | {one.forecast.mode} | {one.forecast.throughput:.1f} | {truth.median:.1f} "
                f"({truth.low:.1f} to {truth.high:.1f}) | {one.error:+.1%} |"
            )
            print(f"  {forecasts[-1]}", flush=True)
    within = sum(one <= BAR for one in errors)
    lines = [
        "# `muster bench scaling`: forecast and measured speed",
        "",
        "Written by",
        "",
        f"    python {' '.join(sys.argv)}",
        "",
        f"Measured on {date.today()} on {platform.machine()} with {usable_cores().value} cores and gloo. Each rank has 1 thread, so 2 ranks "
        f"have a core each and 4 ranks share the cores. The figures are medians of {options.passes} x {options.rounds} rounds.",
        "",
        "## Speed on 4 ranks, forecast from 1 and 2 ranks",
        "",
        f"**{within} of {len(errors)}** forecasts are within {BAR:.0%} of the measured speed. The mean error is "
        f"{statistics.fmean(errors):.1%}, the largest {max(errors):.1%}.",
        "",
        "| workload | mode | forecast, samples/s | measured | error |",
        "|---|---|---|---|---|",
        *forecasts,
        "",
        "## Speed, and where the time of a step goes",
        "",
        "| workload | mode | ranks | samples/s | speed-up | efficiency | ideal | smaller portions | "
        "contention between ranks | data | imbalance | exposed communication |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *speeds,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
