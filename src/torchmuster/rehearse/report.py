"""A rehearsal as text, JSON and a page with pictures."""

from dataclasses import asdict
from html import escape

from torchmuster.pages.charts import RULES, Axis, Bar, Curve, bar_chart, line_chart
from torchmuster.pages.frame import html_page, html_table
from torchmuster.rehearse.failures import GPU_HOURS_PER_FAILURE, PUBLISHED
from torchmuster.rehearse.rehearsal import BYTES_PER_PARAMETER, FailureForecast, Rehearsal, Saving
from torchmuster.units import format_bytes, format_seconds, plural


def rehearsal_rows(rehearsal: Rehearsal) -> list[tuple[str, str, str]]:
    """Return what was found: a name, the figure, and where it comes from."""
    control, host = rehearsal.control, rehearsal.host
    measured = f"measured here with {control.simulated:,} simulated hosts"
    if control.simulated < control.hosts:
        measured = f"extrapolated from {control.simulated:,} simulated hosts"
    rows = [
        (
            "start",
            format_seconds(rehearsal.start_s),
            f"launcher {control.start_s:.1f} s, {measured}; then {host.seconds:.1f} s on each host, "
            "measured here with one rank",
        ),
        (
            "launcher",
            f"{control.heartbeats_cpu:.2f} cores, {format_bytes(control.memory_bytes)}",
            f"with the heartbeats of all hosts; it sends {format_bytes(control.sent_bytes)} for the start",
        ),
    ]
    if control.notice_s is not None and control.stop_s is not None:
        rows.append(
            (
                "dead host",
                f"noticed after {format_seconds(control.notice_s)}",
                f"without a sign from it (--lost-after); the others get the request to stop within {control.stop_s:.1f} s",
            )
        )
    if rehearsal.saving is not None:
        rows += _saving_rows(rehearsal, rehearsal.saving)
    if rehearsal.failures is not None:
        rows += _failure_rows(rehearsal, rehearsal.failures)
    return rows


def _saving_rows(rehearsal: Rehearsal, saving: Saving) -> list[tuple[str, str, str]]:
    request = rehearsal.request
    rate = format_bytes(round(request.write_bytes_per_s))
    return [
        (
            "save",
            format_seconds(saving.save_s),
            f"{format_bytes(round(saving.size_bytes))} ({BYTES_PER_PARAMETER} bytes per parameter) at {rate}/s per host, assumed "
            f"(--write-rate), written and read back; training waits {saving.stall_s:.2f} s for the copy at 10 GB/s, assumed",
        ),
        (
            "checkpoint",
            f"{saving.files:,} files",
            f"manifest {format_bytes(saving.manifest_bytes)}, encoded and parsed in {saving.commit_s:.2f} s, measured here",
        ),
    ]


def _failure_rows(rehearsal: Rehearsal, found: FailureForecast) -> list[tuple[str, str, str]]:
    request = rehearsal.request
    rows = [
        (
            "failures",
            f"one every {format_seconds(found.failure_every_s)}",
            f"computed from {request.gpu_hours_per_failure:,.0f} GPU hours per failure "
            f"({PUBLISHED if request.gpu_hours_per_failure == GPU_HOURS_PER_FAILURE else '--gpu-hours-per-failure'})",
        ),
        (
            "save interval",
            format_seconds(found.interval_s),
            "Young's optimum, but not before the last save is committed",
        ),
        (
            "spares",
            str(found.spares),
            ("as requested" if request.spares is not None else "the most useful work per paid host")
            + f", if a repair takes {format_seconds(request.repair_s)} (assumed, --repair) and the run "
            + (
                "continues with fewer hosts"
                if request.elastic
                else "waits for it if no spare is left"
            ),
        ),
        (
            "goodput",
            f"{found.goodput:.1%}",
            f"of {len(found.months)} simulated months; 9 of 10 of them between {found.low:.1%} and {found.high:.1%}",
        ),
        (
            "recovery",
            f"{format_seconds(found.costs.takeover_s)} with a spare",
            f"{format_seconds(found.costs.restart_s)} with a restart; computed: notice, stop, start, load",
        ),
    ]
    if request.step_s is not None:
        steps = found.failure_every_s / request.step_s
        rows.append(("steps", f"{steps:,.0f} between failures", f"of {request.step_s:.3g} s each"))
    return rows


def rehearsal_text(rehearsal: Rehearsal) -> str:
    """Return the result for a terminal."""
    request = rehearsal.request
    ranks = request.hosts * request.gpus_per_host
    lines = [f"{plural(request.hosts, 'host')}, {request.gpus_per_host} GPUs each: {ranks:,} ranks"]
    rows = rehearsal_rows(rehearsal)
    wide = max(len(name) for name, _, _ in rows)
    for name, figure, source in rows:
        lines.append(f"  {name.ljust(wide)}  {figure}")
        lines.append(f"  {' ' * wide}    {source}")
    return "\n".join(lines)


def rehearsal_json(rehearsal: Rehearsal) -> dict[str, object]:
    """Return the result as plain JSON types."""
    found = rehearsal.failures
    return {
        "hosts": rehearsal.request.hosts,
        "gpus_per_host": rehearsal.request.gpus_per_host,
        "start_s": round(rehearsal.start_s, 2),
        "control_plane": asdict(rehearsal.control),
        "host_start": asdict(rehearsal.host),
        "saving": None if rehearsal.saving is None else asdict(rehearsal.saving),
        "failures": None
        if found is None
        else {
            "failure_every_s": found.failure_every_s,
            "interval_s": found.interval_s,
            "spares": found.spares,
            "goodput": found.goodput,
            "goodput_low": found.low,
            "goodput_high": found.high,
            "costs": asdict(found.costs),
        },
    }


def rehearsal_page(rehearsal: Rehearsal) -> str:
    """Return the result as a page with pictures."""
    rows = rehearsal_rows(rehearsal)
    title = f"Rehearsal: {plural(rehearsal.request.hosts, 'host')}"
    parts = [f"<h1>{escape(title)}</h1>", html_table(("", "figure", "source"), rows)]
    if rehearsal.failures is not None:
        parts += failure_charts(rehearsal.failures)
    return html_page(title, parts, style=f"{RULES}td{{white-space:normal}}")


def failure_charts(found: FailureForecast) -> list[str]:
    """Return the pictures of a failure forecast, as SVG."""
    month = found.months[0]
    return [
        line_chart(
            "Goodput and save interval (first order)",
            Axis(title="time between saves", unit="s", log=True),
            Axis(title="goodput", unit="%", from_zero=False),
            [Curve(name="", points=[(at, 100 * value) for at, value in found.over_interval])],
        ),
        line_chart(
            "Useful work per paid host and spares",
            Axis(title="spares"),
            Axis(title="useful work", unit="%", from_zero=False),
            [Curve(name="", points=[(at, 100 * value) for at, value in found.over_spares])],
        ),
        bar_chart(
            "Time without new work in one simulated month",
            "%",
            [
                Bar(name="waiting for saves", value=100 * month.saving),
                Bar(name="work done again", value=100 * month.lost_work),
                Bar(name="recovering, or waiting for a repair", value=100 * month.recovering),
            ],
        ),
    ]
