"""The report on data loading: best configuration, its rate, and worker startup time."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench import loader
from torchmuster.bench.environment import Environment
from torchmuster.bench.loader import LoaderAnswer, Read
from torchmuster.bench.record import BenchRecord, Json, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Bar, amount_text, bar_chart
from torchmuster.units import format_bytes, plural

_UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class MeasuredLoader:
    """The measurements of a loader bench."""

    data: str  # display name
    answer: LoaderAnswer  # of the first rank
    ranks: int
    cores: int
    needed_samples_s: float | None  # per rank; None: not specified
    by_workers: Sequence[Read]
    chosen: Decision[Read]
    one_thread: tuple[Read, Read] | None = None  # unchanged, and with one thread per worker


def loader_report(
    measured: MeasuredLoader,
    *,
    where: Decision[str],
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return the report of the measurement."""
    answer, chosen = measured.answer, measured.chosen.value
    return Report(
        bench="data",
        question=f"how fast can {measured.data} be read, and with how many workers?",
        findings=tuple(_loader_report_findings(measured)),
        choices=tuple(_choices(measured, where)),
        tables=tuple(_tables(measured)),
        pictures=tuple(_loader_report_pictures(measured)),
        record=BenchRecord(
            bench="data",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(_loader_report_series(measured)),
            facts={
                "best_workers": chosen.reading.workers,
                "samples_per_step": answer.samples_per_step,
                "batch_bytes": answer.batch_bytes,
                "samples": answer.samples,
                "busy_threads": {
                    str(one.reading.workers): one.busy_threads for one in measured.by_workers
                },
            },
        ),
        took_s=took_s,
    )


def _choices(measured: MeasuredLoader, where: Decision[str]) -> Iterator[Decision[str]]:
    ranks = f" by {measured.ranks} ranks in parallel" if measured.ranks > 1 else ""
    yield Decision(value=f"read for {measured.answer.device}{ranks}", reason=where.reason)
    workers = measured.chosen.value.reading.workers
    yield Decision(
        value=f"{plural(workers, 'worker')} (data.workers: {workers})",
        reason=measured.chosen.reason,
    )


def _loader_report_findings(measured: MeasuredLoader) -> Iterator[Finding]:
    chosen = measured.chosen.value
    yield loader.feeding(
        chosen,
        samples_per_step=measured.answer.samples_per_step,
        needed_samples_s=measured.needed_samples_s,
    )
    yield loader.same_data(measured.by_workers)
    crowded = loader.oversubscription(
        measured.by_workers, cores=measured.cores, ranks=measured.ranks
    )
    if crowded is not None:
        yield crowded
    if measured.one_thread is not None:
        yield loader.one_thread_gain(*measured.one_thread)
    more = loader.more_might_help(measured.by_workers, chosen)
    if more is not None:
        yield more
    if chosen.reading.workers:
        yield _starting(chosen)
    yield _pinning(measured.answer)


def _starting(chosen: Read) -> Finding:
    first = statistics.median(chosen.first_batch_s)
    later = statistics.median(chosen.next_epoch_s)
    return Finding(
        name="data-start",
        status=Status.OK,
        what=f"the first batch takes {amount_text(first, 's')}, including the start of "
        f"{chosen.reading.name}; the first batch of later epochs takes {amount_text(later, 's')}",
        why="workers of indexed datasets persist across epochs; workers of streams are restarted",
    )


def _pinning(answer: LoaderAnswer) -> Finding:
    if not answer.pinned_to_device_s:
        return Finding(
            name="data-pinning",
            status=Status.NOTE,
            what="the gain from pinned memory is unknown: no accelerator on this host",
        )
    plain = statistics.median(answer.to_device_s)
    pinned = statistics.median(answer.pinned_to_device_s)
    return Finding(
        name="data-pinning",
        status=Status.OK,
        what=f"copying a batch of {format_bytes(answer.batch_bytes)} to the device takes "
        f"{amount_text(pinned, 's')} "
        f"from pinned memory, {amount_text(plain, 's')} from pageable memory",
        why="on CUDA devices, muster train pins the batches it reads",
    )


def _tables(measured: MeasuredLoader) -> Iterator[Table]:
    answer = measured.answer
    each = " per rank" if measured.ranks > 1 else ""
    yield Table(
        title=f"samples/s{each}, batches of {answer.samples_per_batch} "
        f"({format_bytes(answer.batch_bytes)})",
        head=(
            *("workers", "samples/s", "±", "vs. 0", "first batch", "next epoch"),
            *("busy cores", "threads"),
        ),
        rows=tuple(_loader_report_row(one, measured.by_workers[0]) for one in measured.by_workers),
        note=f"Measured without training, on {measured.cores} cores. Threads: computing "
        "threads in "
        "one worker, or in the rank without workers.",
    )


def _loader_report_row(one: Read, first: Read) -> tuple[str, ...]:
    ratio = one.rate.median / first.rate.median
    return (
        str(one.reading.workers),
        f"{one.rate.median:,.0f}",
        f"{one.rate.noise * 100:.0f} %",
        f"{ratio:.2f} x",
        amount_text(statistics.median(one.first_batch_s), "s"),
        amount_text(statistics.median(one.next_epoch_s), "s"),
        _UNKNOWN if one.busy_cores is None else f"{one.busy_cores:.1f}",
        _UNKNOWN if one.busy_threads is None else str(one.busy_threads),
    )


def _loader_report_pictures(measured: MeasuredLoader) -> Iterator[Picture]:
    yield Picture(
        title="samples/s",
        svg=bar_chart(
            "Samples/s by number of workers",
            "samples/s",
            [
                Bar(
                    name=one.reading.name,
                    value=one.rate.median,
                    low=one.rate.low,
                    high=one.rate.high,
                    label=f"{one.rate.median:,.0f}",
                )
                for one in measured.by_workers
            ],
        ),
        caption="The lines are 95 % intervals of the median.",
    )


def _loader_report_series(measured: MeasuredLoader) -> Iterator[Series]:
    for one in measured.by_workers:
        labels: dict[str, str | int | float] = {"workers": one.reading.workers}
        yield Series(
            name="rate", unit="samples/s", better="higher", samples=one.samples_s, labels=labels
        )
        yield Series(
            name="first_batch", unit="s", better="lower", samples=one.first_batch_s, labels=labels
        )
        yield Series(
            name="next_epoch", unit="s", better="lower", samples=one.next_epoch_s, labels=labels
        )
