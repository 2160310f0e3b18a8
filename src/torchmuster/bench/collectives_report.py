"""The report on messages between ranks: latency, bandwidth and anomalies."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torchmuster.bench import bandwidth
from torchmuster.bench.bandwidth import OPERATIONS, CurvePoint, CurveShape, points_of, shape_of
from torchmuster.bench.collectives import CollectivesRequest, MeasuredCollective, series_of
from torchmuster.bench.environment import Environment
from torchmuster.bench.record import BenchRecord
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.bench.statistics import estimate
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Curve, amount_text, line_chart
from torchmuster.units import format_bytes

BENCH = "collectives"
_BADLY_FITTED = 0.25
_NOISY = 0.15
_SHOWN_WRONG = 6


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The evaluation of one operation."""

    operation: str
    points: list[CurvePoint]
    shape: CurveShape
    fit: bandwidth.AlphaBeta | None
    factor: float


def collectives_report(
    measured: MeasuredCollective,
    asked: CollectivesRequest,
    *,
    environment: Environment,
    date: str,
    took_s: float,
) -> Report:
    """Return the report of a measurement."""
    seen = [_look_collectives_report(measured, operation) for operation in measured.times]
    return Report(
        bench=BENCH,
        question=f"How fast is communication between {measured.ranks} ranks on "
        f"{_places(measured)}?",
        findings=(
            *_collectives_report_values(measured),
            *(_collectives_report_verdict(one, measured) for one in seen),
            *(finding for one in seen for finding in _oddities(one)),
            *_circumstances(measured, environment),
        ),
        tables=(_lines_table(seen), *_by_size_tables(measured, seen)),
        pictures=tuple(_collectives_report_pictures(seen)),
        record=BenchRecord(
            bench=BENCH,
            date=date,
            settings={
                "ranks": measured.ranks,
                "hosts": list(measured.hosts),
                "backend": measured.backend,
                "device": asked.device,
                "operations": list(asked.operations),
                "sizes_bytes": list(asked.sizes_bytes),
                "rounds": asked.rounds,
            },
            environment=environment,
            series=series_of(measured),
            facts={
                "values_compared": measured.compared,
                "values_wrong": sum(one.wrong for one in measured.wrong),
                "lines": {one.operation: asdict(one.fit) for one in seen if one.fit},
                "bus_bytes_s_at_most": {
                    one.operation: one.shape.peak.bytes_s.median for one in seen
                },
                "half_of_it_at_bytes": {one.operation: one.shape.half_at_bytes for one in seen},
            },
        ),
        took_s=took_s,
    )


def _look_collectives_report(measured: MeasuredCollective, operation: str) -> _Seen:
    times = measured.times[operation]
    factor = OPERATIONS[operation].bus_factor(measured.ranks)
    points = points_of(times, factor)
    return _Seen(
        operation=operation,
        points=points,
        shape=shape_of(points),
        fit=bandwidth.fit_alpha_beta(times),
        factor=factor,
    )


def _places(measured: MeasuredCollective) -> str:
    hosts = list(dict.fromkeys(measured.hosts))
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"


def _collectives_report_values(measured: MeasuredCollective) -> Iterator[Finding]:
    if not measured.wrong:
        yield Finding(
            name="values",
            status=Status.OK,
            what=f"all values correct: {measured.compared:,} compared on {measured.ranks} ranks",
        )
        return
    ranks = sorted({one.rank for one in measured.wrong})
    yield Finding(
        name="values",
        status=Status.FAILURE,
        what=f"{sum(one.wrong for one in measured.wrong):,} of {measured.compared:,} values are wrong, "
        f"on rank {', '.join(map(str, ranks))}",
        why="ranks receive values that differ from the ones sent; training would silently use wrong "
        "gradients",
        fix="muster check  # finds the rank, device or link that corrupts values",
        evidence="\n".join(
            f"rank {one.rank} ({one.host}): {one.operation} of {format_bytes(one.size_bytes)}: "
            f"{one.wrong} of {one.compared} wrong; {one.first}"
            for one in measured.wrong[:_SHOWN_WRONG]
        ),
    )


def _collectives_report_verdict(one: _Seen, measured: MeasuredCollective) -> Finding:
    smallest, samples = min(measured.times[one.operation].items())
    half = one.shape.half_at_bytes
    reached = (
        f"already over half of that at {format_bytes(smallest)}"
        if half is None
        else f"half of that from {format_bytes(half)} on"
    )
    peak = one.shape.peak
    return Finding(
        name=f"speed-{one.operation}",
        status=Status.OK,
        what=f"{one.operation}: {amount_text(estimate(samples).median, 's')} for {format_bytes(smallest)}, "
        f"at most {amount_text(peak.bytes_s.median, 'B/s')} bus bandwidth "
        f"(at {format_bytes(peak.size_bytes)}); {reached}",
    )


def _oddities(one: _Seen) -> Iterator[Finding]:
    for dip in one.shape.dips:
        yield Finding(
            name="dip",
            status=Status.WARNING,
            what=f"{one.operation} of {format_bytes(dip.size_bytes)} reaches {dip.share:.0%} of the "
            "bandwidth of smaller and larger messages",
            why="the library uses another algorithm for this size, or other load disturbed it in "
            "most rounds",
            fix="measure again; if the dip remains, avoid messages of this size (DDP: bucket_cap_mb), or try "
            "other algorithms (NCCL_ALGO, NCCL_PROTO)",
        )
    last = one.shape.falls_to
    if last is not None:
        peak = one.shape.peak
        share = last.bytes_s.median / peak.bytes_s.median
        yield Finding(
            name="falls",
            status=Status.NOTE,
            what=f"{one.operation}: {format_bytes(last.size_bytes)} reaches {share:.0%} of the bandwidth "
            f"of {format_bytes(peak.size_bytes)}",
            why="messages no longer fit into a cache; normal on the CPU",
        )
    if one.fit is not None and one.fit.misfit > _BADLY_FITTED:
        yield Finding(
            name="no-line",
            status=Status.NOTE,
            what=f"{one.operation}: a fit of latency and bandwidth does not describe the times well "
            f"(fit error {one.fit.misfit:.0%})",
            why="libraries switch algorithms with the message size; use the curve instead",
        )


def _circumstances(measured: MeasuredCollective, environment: Environment) -> Iterator[Finding]:
    on_one = max(measured.hosts.count(host) for host in measured.hosts)
    if measured.device == "cpu" and on_one > environment.cores:
        yield Finding(
            name="crowded",
            status=Status.NOTE,
            what=f"{on_one} ranks share {environment.cores} cores",
            why="a message also waits until its receiver gets a core: the times measure this "
            "contention, "
            "not the links",
            fix=f"--ranks {environment.cores} or fewer measures the links",
        )
    noises = sorted(
        estimate(samples).noise
        for by_size in measured.times.values()
        for samples in by_size.values()
    )
    middle = noises[len(noises) // 2]
    if middle > _NOISY:
        yield Finding(
            name="noisy",
            status=Status.NOTE,
            what=f"the times vary: the median noise is ± {middle:.0%}",
            why="other processes use the host or the network",
            fix="measure on an idle host, or with more --rounds",
        )


def _lines_table(seen: list[_Seen]) -> Table:
    rows = []
    for one in seen:
        if one.fit is None:
            continue
        fit = one.fit
        latency = (
            f"from {amount_text(fit.latency_low_s, 's')} to {amount_text(fit.latency_high_s, 's')}"
        )
        bus, sure = "unknown", ""
        if fit.bytes_s and fit.bytes_low_s:
            bus = amount_text(fit.bytes_s * one.factor, "B/s")
            sure = f"from {amount_text(fit.bytes_low_s * one.factor, 'B/s')}"
            if fit.bytes_high_s:
                sure += f" to {amount_text(fit.bytes_high_s * one.factor, 'B/s')}"
        half = one.shape.half_at_bytes
        rows.append(
            (
                one.operation,
                amount_text(fit.latency_s, "s"),
                latency,
                bus,
                sure,
                "-" if half is None else format_bytes(half),
                f"{fit.misfit:.0%}",
            )
        )
    return Table(
        title="latency and bandwidth, fitted over all sizes",
        head=("", "latency", "95 %", "bus bandwidth", "95 %", "half of it from", "fit error"),
        rows=tuple(rows),
    )


def _by_size_tables(measured: MeasuredCollective, seen: list[_Seen]) -> tuple[Table, Table]:
    """Return times and bandwidths, a row for each size."""
    head = ("size", *(one.operation for one in seen))
    times, bandwidths = [], []
    for place, first in enumerate(seen[0].points):
        size = format_bytes(first.size_bytes)
        taken = (estimate(measured.times[one.operation][first.size_bytes]) for one in seen)
        times.append(
            (size, *(f"{amount_text(one.median, 's')} ± {one.noise:.0%}" for one in taken))
        )
        bandwidths.append(
            (size, *(amount_text(one.points[place].bytes_s.median, "B/s") for one in seen))
        )
    sizes = "; ".join(f"{one.operation}: {OPERATIONS[one.operation].size}" for one in seen)
    return (
        Table(title="time, of the slowest rank", head=head, rows=tuple(times)),
        Table(
            title="bus bandwidth",
            head=head,
            rows=tuple(bandwidths),
            note=f"size as in nccl-tests ({sizes})",
        ),
    )


def _collectives_report_pictures(seen: list[_Seen]) -> Iterator[Picture]:
    size = Axis(title="size of the message", unit="B", log=True)
    curves = [
        Curve(
            name=one.operation,
            points=[(point.size_bytes, point.bytes_s.median) for point in one.points],
            low=[point.bytes_s.low for point in one.points],
            high=[point.bytes_s.high for point in one.points],
        )
        for one in seen
    ]
    yield Picture(
        title="Bus bandwidth by size",
        svg=line_chart(
            "Bus bandwidth by size", size, Axis(title="bus bandwidth", unit="B/s"), curves
        ),
        caption="Bus bandwidth does not depend on the number of ranks, so it can be compared with "
        "the hardware. It should grow with the size and then stay constant: a dip is a size to "
        "avoid. Bars are 95 % intervals.",
    )
    taken = [
        Curve(
            name=one.operation,
            points=[
                (point.size_bytes, one.factor * point.size_bytes / point.bytes_s.median)
                for point in one.points
            ],
        )
        for one in seen
    ]
    yield Picture(
        title="Time by size",
        svg=line_chart("Time by size", size, Axis(title="time", unit="s", log=True), taken),
        caption="Where the curves are flat (small messages), latency dominates, and combining "
        "messages is faster.",
    )
