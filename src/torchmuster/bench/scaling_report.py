"""The report of a scaling study: speed-up, losses, and a forecast for more ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from torchmuster.bench.environment import Environment
from torchmuster.bench.record import BenchRecord, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.bench.scaling import (
    BESIDE,
    COMMUNICATION,
    DATA,
    IMBALANCE,
    LOSSES,
    MODES,
    SMALLER,
    CheckedForecast,
    Mode,
    OnRanks,
    Scaled,
    ScalingForecast,
    ScalingStudy,
    checked_forecasts,
    forecast_scaling,
    scaled,
)
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Curve, Stack, amount_text, line_chart, stacked_chart

BENCH = "scaling"
_GOOD_FORECAST = 0.15
_GOOD_EFFICIENCY = 0.8
_ADVICE = {
    SMALLER: "give each rank more samples: a larger global batch (weak scaling) loses less",
    BESIDE: "ranks share cores or memory bandwidth: use fewer ranks per host, or more hosts",
    DATA: "use more loader workers (data.workers): muster bench data finds how many",
    IMBALANCE: "one rank is slower than the others: muster profile names the rank and phase",
    COMMUNICATION: "communicate less often (more samples or micro-batches per step), or use "
    "faster links: "
    "muster bench collectives measures these",
}


def scaling_report(
    study: ScalingStudy,
    measured: Mapping[int, OnRanks],
    *,
    what: str,
    choices: Sequence[Decision[str]],
    notes: Sequence[Finding],
    environment: Environment,
    date: str,
    took_s: float,
) -> Report:
    """Return the report of a study; ``what`` names the training."""
    seen = [scaled(study, measured, ranks, mode) for mode in MODES for ranks in study.ranks]
    checks = checked_forecasts(study, measured)
    next_ones = _next(study, measured)
    return Report(
        bench=BENCH,
        question=f"How does {what} scale with more ranks?",
        findings=(
            *(_scaling_report_verdict(mode, seen) for mode in MODES),
            *_crowd(study),
            *(_on_forecast(one) for one in checks),
            *(_outlook(one, seen) for one in next_ones),
            *notes,
        ),
        choices=tuple(choices),
        tables=(_speed_table(seen), _loss_table(seen)),
        pictures=tuple(_scaling_report_pictures(seen, checks)),
        record=BenchRecord(
            bench=BENCH,
            date=date,
            settings=_settings(study, what),
            environment=environment,
            series=tuple(_scaling_report_series(measured)),
            facts={
                "parts_s": {f"{one.mode} {one.ranks}": dict(one.parts_s) for one in seen},
                "speed_up": {f"{one.mode} {one.ranks}": one.speed_up.median for one in seen},
                "sent_bytes": measured[max(study.ranks)].sent_bytes,
                "forecasts": [
                    {**asdict(one.forecast), "error": one.error} for one in checks
                ] + [asdict(one) for one in next_ones],
            },
        ),
        took_s=took_s,
    )  # fmt: skip


def _next(study: ScalingStudy, measured: Mapping[int, OnRanks]) -> list[ScalingForecast]:
    """Forecast twice the measured number of ranks, if a portion of that size was timed."""
    most = study.ranks[-1]
    if study.device == "gpu":  # ranks do not share devices: more ranks would use more devices
        study = replace(study, slots=None)
    made = (forecast_scaling(study, measured, 2 * most, mode, few=most) for mode in MODES)
    return [one for one in made if one is not None]


def _settings(study: ScalingStudy, what: str) -> dict[str, object]:
    return {
        "training": what,
        "strategy": study.strategy,
        "precision": study.precision,
        "ranks": list(study.ranks),
        "whole": study.whole,
        "micro_batch_size": study.micro_batch_size,
        "workers": study.workers,
        "device": study.device,
        "threads": study.threads,
        "rounds": study.rounds,
        "passes": study.passes,
    }


def _scaling_report_series(measured: Mapping[int, OnRanks]) -> Iterator[Series]:
    for ranks, one in measured.items():
        for portion, taken in one.by_portion.items():
            labels = {"ranks": ranks, "samples_of_a_rank": portion}
            for name, samples in (("step", taken.step_s), ("step, nothing sent", taken.alone_s)):
                if ranks > 1 or name == "step":
                    yield Series(
                        name=name, unit="s", better="lower", samples=samples, labels=labels
                    )
        for size, samples in one.messages_s.items():
            yield Series(
                name="all-reduce",
                unit="s",
                better="lower",
                samples=samples,
                labels={"ranks": ranks, "size_bytes": size},
            )


def _scaling_report_verdict(mode: Mode, seen: Sequence[Scaled]) -> Finding:
    of_mode = [one for one in seen if one.mode == mode]
    last = of_mode[-1]
    best = max(of_mode, key=lambda one: one.throughput.median)
    words = (
        f"{mode} scaling: {last.ranks} ranks are {last.speed_up.median:.2f} times as fast as one "
        "rank "
        f"({_scaling_report_rate(last.throughput.median)}): {last.efficiency.median:.0%} of the "
        f"ideal {last.ranks} times"
    )
    worst = last.worst_loss
    share = 0.0 if worst is None else last.parts_s[worst] / last.step_s.median
    why = fix = ""
    if worst is not None and last.efficiency.median < _GOOD_EFFICIENCY:
        why = f"the largest loss is {worst}, {share:.0%} of a step"
        fix = _ADVICE[worst]
    status = Status.OK if last.efficiency.median >= _GOOD_EFFICIENCY else Status.NOTE
    if best is not last and last.throughput.high < best.throughput.low:
        status = Status.WARNING
        words += f"; {best.ranks} are faster ({_scaling_report_rate(best.throughput.median)})"
    return Finding(name=f"{mode}-scaling", status=status, what=words, why=why, fix=fix)


def _crowd(study: ScalingStudy) -> Iterator[Finding]:
    if study.device != "cpu" or study.slots is None:
        return
    crowded = [number for number in study.ranks if number > study.slots]
    if crowded:
        many = ", ".join(map(str, crowded))
        yield Finding(
            name="crowded",
            status=Status.NOTE,
            what=f"{many} ranks shared {study.slots * (study.threads or 1)} cores",
            why=f"each uses {study.threads} "
            f"{'thread' if study.threads == 1 else 'threads'}, so {study.slots} ranks have "
            "exclusive cores; more ranks cannot be faster. Ranks on separate hosts or devices do "
            "not have this limit",
        )


def _on_forecast(one: CheckedForecast) -> Finding:
    few = " and ".join(map(str, one.forecast.from_ranks))
    good = abs(one.error) <= _GOOD_FORECAST
    return Finding(
        name="forecast",
        status=Status.OK if good else Status.NOTE,
        what=f"{one.forecast.mode}: forecast for {one.forecast.ranks} ranks from {few} ranks: "
        f"{_scaling_report_rate(one.forecast.throughput)}; measured: "
        f"{_scaling_report_rate(one.measured.throughput.median)} "
        f"({one.error:+.0%})",
        why="" if good else "do not trust forecasts for more ranks here",
    )


def _outlook(one: ScalingForecast, seen: Sequence[Scaled]) -> Finding:
    alone = next(item for item in seen if item.ranks == 1).throughput.median
    return Finding(
        name="outlook",
        status=Status.NOTE,
        what=f"{one.mode}: {one.ranks} ranks with the same links and devices would reach "
        f"{_scaling_report_rate(one.throughput)}, {one.throughput / alone:.2f} times one rank "
        "(forecast, not measured)",
    )


def _scaling_report_rate(samples_s: float) -> str:
    return amount_text(samples_s, "samples/s")


def _speed_table(seen: Sequence[Scaled]) -> Table:
    return Table(
        title="speed",
        head=(
            "",
            "ranks",
            "samples per rank",
            "step",
            "throughput",
            "speed-up",
            "95 %",
            "efficiency",
        ),
        rows=tuple(
            (
                one.mode,
                str(one.ranks),
                str(one.portion),
                f"{amount_text(one.step_s.median, 's')} ± {one.step_s.noise:.0%}",
                _scaling_report_rate(one.throughput.median),
                f"{one.speed_up.median:.2f}",
                f"{one.speed_up.low:.2f} to {one.speed_up.high:.2f}",
                f"{one.efficiency.median:.0%}",
            )
            for one in seen
        ),
        note="strong: the ranks split the batch of one rank; weak: each rank has a batch of that "
        "size",
    )


def _loss_table(seen: Sequence[Scaled]) -> Table:
    return Table(
        title="time breakdown of a step",
        head=("", "ranks", *next(iter(seen)).parts_s),
        rows=tuple(
            (
                one.mode,
                str(one.ranks),
                *(f"{part / one.step_s.median:.0%}" for part in one.parts_s.values()),
            )
            for one in seen
            if one.ranks > 1
        ),
        note="ideal: the time with perfect scaling. All others are losses, each a difference "
        "between two "
        "measured times",
    )


def _scaling_report_pictures(
    seen: Sequence[Scaled], checks: Sequence[CheckedForecast]
) -> Iterator[Picture]:
    most = max(one.ranks for one in seen)
    alone = next(one for one in seen if one.ranks == 1).throughput.median
    curves = [
        Curve(
            name=mode,
            points=[(one.ranks, one.speed_up.median) for one in seen if one.mode == mode],
            low=[one.speed_up.low for one in seen if one.mode == mode],
            high=[one.speed_up.high for one in seen if one.mode == mode],
        )
        for mode in MODES
    ]
    curves += [
        Curve(
            name=f"{one.forecast.mode}, forecast from {'+'.join(map(str, one.forecast.from_ranks))}",
            points=[(one.forecast.ranks, one.forecast.throughput / alone)],
        )
        for one in checks
    ]
    curves.append(Curve(name="ideal", points=[(1, 1), (most, most)], dashed=True))
    yield Picture(
        title="Speed-up",
        svg=line_chart(
            "Speed-up over one rank", Axis(title="ranks"), Axis(title="speed-up"), curves
        ),
        caption="The dashed line is perfect scaling. Bars are 95 % intervals.",
    )
    yield Picture(
        title="Time breakdown",
        svg=stacked_chart(
            "Time breakdown of a step",
            "%",
            [
                Stack(
                    name=f"{one.mode}, {one.ranks}",
                    parts={
                        name: 100 * part / one.step_s.median for name, part in one.parts_s.items()
                    },
                )
                for one in seen
                if one.ranks > 1
            ],
        ),
        caption=f"Ideal is the time with perfect scaling; the losses are {', '.join(LOSSES)}.",
    )
