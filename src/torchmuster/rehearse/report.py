"""A rehearsal as text, JSON and a page with pictures."""

from dataclasses import asdict
from html import escape

from torchmuster.pages.charts import RULES, Axis, Bar, Curve, bar_chart, line_chart
from torchmuster.pages.frame import html_page, html_table
from torchmuster.rehearse.control_plane import ControlPlane
from torchmuster.rehearse.failures import GPU_HOURS_PER_FAILURE, PERIOD_S, PUBLISHED
from torchmuster.rehearse.rehearsal import (
    BYTES_PER_PARAMETER,
    USUAL_INTERVAL_S,
    FailureForecast,
    Rehearsal,
    Saving,
)
from torchmuster.units import format_bytes, format_seconds, plural


def rehearsal_rows(rehearsal: Rehearsal) -> list[tuple[str, str, str]]:
    """Return what was found: a name, the figure, and where it comes from."""
    control, host = rehearsal.control, rehearsal.host
    measured = _measured(control)
    rows = [
        (
            "start",
            _duration(rehearsal.start_s),
            f"launcher {control.start_s:.1f} s, {measured}; then {host.seconds:.1f} s on each host, "
            "measured here with one rank",
        ),
        (
            "launcher",
            f"{100 * control.heartbeats_cpu:.1f} % of a core, {format_bytes(control.memory_bytes)}",
            f"CPU time for the heartbeats of all hosts, and memory, {measured}; it sends "
            f"{format_bytes(control.sent_bytes)} to all hosts together",
        ),
    ]
    if control.notice_s is not None and control.stop_s is not None:
        rows.append(
            (
                "dead host",
                f"noticed after {_duration(control.notice_s)}",
                f"without a heartbeat (--lost-after); {control.stop_s:.1f} s later all other hosts have the request to "
                f"stop, {measured}",
            )
        )
    if rehearsal.saving is not None:
        rows += _saving_rows(rehearsal, rehearsal.saving)
    if rehearsal.failures is not None:
        rows += _failure_rows(rehearsal, rehearsal.failures)
    return rows


def _measured(control: ControlPlane) -> str:
    if control.simulated < control.hosts:
        return f"extrapolated from {control.simulated:,} simulated hosts"
    return f"measured here with {control.simulated:,} simulated hosts"


def _saving_rows(rehearsal: Rehearsal, saving: Saving) -> list[tuple[str, str, str]]:
    request = rehearsal.request
    rate, total = (_rate(request.write_bytes_per_s * hosts) for hosts in (1, request.hosts))
    meanwhile = (
        "minus one step, which runs meanwhile"
        if request.step_s
        else "as if no step ran meanwhile (--step-time)"
    )
    return [
        (
            "save",
            _duration(saving.save_s),
            f"{_duration(saving.write_s)} to write and read back {format_bytes(round(saving.size_bytes))} "
            f"({BYTES_PER_PARAMETER} bytes per parameter) at {rate} per host, {total} in total (assumed, --write-rate); "
            f"{_duration(saving.agree_s)} for the ranks to agree and rank 0 to commit, computed from CPU times per rank "
            "that were measured with 512 ranks (agree) and 16,384 ranks (commit)",
        ),
        (
            "stall",
            f"{_duration(saving.stall_s)} per save",
            "until the ranks agree on the layout, plan, and copy their state (10 GB/s per GPU, assumed), "
            + meanwhile,
        ),
        (
            "checkpoint",
            f"{saving.files:,} files",
            f"manifest {format_bytes(saving.manifest_bytes)}",
        ),
    ]


def _failure_rows(rehearsal: Rehearsal, found: FailureForecast) -> list[tuple[str, str, str]]:
    request, control = rehearsal.request, rehearsal.control
    per_failure = f"{request.gpu_hours_per_failure:,.0f} GPU hours per failure"
    costs = found.costs
    expected = PERIOD_S / found.failure_every_s
    rows = [
        (
            "failures",
            f"one every {format_seconds(found.failure_every_s)}, {expected:,.{0 if expected >= 10 else 1}f} in 30 days",
            f"computed from {per_failure}: {PUBLISHED}"
            if request.gpu_hours_per_failure == GPU_HOURS_PER_FAILURE
            else f"computed from {per_failure} (--gpu-hours-per-failure)",
        ),
        (
            "save interval",
            _duration(found.interval_s),
            "the longest of a step, a save, and Young's optimum √(2 × stall × time between failures); with a save every "
            f"{format_seconds(USUAL_INTERVAL_S)} (default), goodput is {100 * found.usual_goodput:.1f} %",
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
            f"{100 * found.goodput:.1f} %",
            f"mean of {len(found.months)} simulated months; 9 of 10 months are between {100 * found.low:.1f} % and "
            f"{100 * found.high:.1f} %",
        ),
        (
            "recovery",
            f"at most {_duration(costs.takeover_s)} with a spare",
            f"{_duration(costs.restart_s)} with a restart; computed: notice a dead host, stop all hosts, test their links and "
            f"start them ({control.restart_s:.1f} s, {_measured(control)}), start the ranks, load the checkpoint; a spare saves the test",
        ),
    ]
    if request.step_s is not None:
        steps = found.failure_every_s / request.step_s
        rows.append(("steps", f"{steps:,.0f} between failures", f"of {request.step_s:.3g} s each"))
    return rows


def _duration(seconds: float) -> str:
    """Format a duration: with one decimal below 10 s, in seconds below 5 min."""
    if seconds < 300:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    return format_seconds(seconds)


def _rate(bytes_per_s: float) -> str:
    """Format a rate in the decimal units in which --write-rate is given."""
    unit, size = ("TB/s", 1e12) if bytes_per_s >= 1e12 else ("GB/s", 1e9)
    return f"{bytes_per_s / size:.3g} {unit}"


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
