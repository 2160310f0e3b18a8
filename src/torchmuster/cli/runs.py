"""``muster runs``: list the runs in a folder and their state."""

import argparse
import os
import time
from collections.abc import Sequence

from torchmuster.cli import output, parsers
from torchmuster.devices.claims import Claims
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.errors import ExitCode
from torchmuster.launch.history import run_state
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.units import format_seconds, plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster runs``."""
    parsers.show_examples(parser, ["muster runs", "muster runs --json"])
    parsers.add_runs_flag(parser)
    parser.add_argument("--all", action="store_true", help="list all runs, not only the newest 20")
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_runs)


def _run_runs(options: argparse.Namespace) -> int:
    runs = list_runs(options.runs)
    shown = runs if options.all else runs[:20]
    if options.json:
        line = read_tickets(Claims.here(os.environ).queue)
        output.print_json([_runs_as_json(run, line) for run in shown])
        return ExitCode.GOOD
    if not shown:
        output.print_text(f"no runs in {options.runs}; to start one: muster run script.py")
        return ExitCode.GOOD
    line = read_tickets(Claims.here(os.environ).queue)
    table = [_runs_cells(run, line) for run in shown]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        output.print_text("  ".join([*cells, row[3]]).rstrip())
    if len(runs) > len(shown):
        output.print_text(f"… {len(runs) - len(shown)} older runs: muster runs --all")
    return ExitCode.GOOD


def _place_in_line(run: RunFolder, line: Sequence[WaitingRequest]) -> dict[str, object] | None:
    """Return for what a run waits in the line of this host, and since when; None if it does not."""
    folder = str(run.path.resolve())
    for place, waiting in enumerate(line, start=1):
        if waiting.run == folder:
            return {
                "place": place,
                "of": len(line),
                "for": str(waiting.request),
                "since_unix_s": waiting.since_unix_s,
            }
    return None


def _runs_cells(run: RunFolder, line: Sequence[WaitingRequest]) -> tuple[str, str, str, str]:
    """Return the cells of a run, safe to print: a folder may belong to another user."""
    job, state = run_state.read_job(run), run_state.read_state(run)
    words = printable(job.shown) if job else ""
    if state is None:
        return run.id, "unknown", "-", words
    end = time.time() if state.active else state.since_unix_s
    took = format_seconds(max(0.0, end - state.started_unix_s))
    summary = _summary(run)
    if summary.restarts:
        took += f", {plural(summary.restarts, 'restart')}"
    waiting = _place_in_line(run, line)
    if state.phase == "waiting" and waiting is not None:
        words = f"place {waiting['place']} of {waiting['of']}, waits for {waiting['for']}: {words}"
    elif state.phase in ("failed", "died"):
        words = state.headline.partition("\n")[0]
    elif state.active and summary.hang is not None:
        words = printable([str(summary.hang.facts.get("what", "hangs"))])
    return run.id, state.phase, took, words


def _summary(run: RunFolder) -> run_state.EventSummary:
    return run_state.EventSummary.of(run_state.read_events(run))


def _runs_as_json(run: RunFolder, line: Sequence[WaitingRequest]) -> dict[str, object]:
    job, state, summary = run_state.read_job(run), run_state.read_state(run), _summary(run)
    is_hung = state is not None and state.active and summary.hang is not None
    return {
        "id": run.id,
        "folder": str(run.path.resolve()),
        "phase": state.phase if state else None,
        "waiting": _place_in_line(run, line),
        "exit_code": state.exit_code if state else None,
        "restarts": summary.restarts,
        "hangs": is_hung,
        "headline": state.headline if state else None,
        "started_unix_s": state.started_unix_s if state else None,
        "since_unix_s": state.since_unix_s if state else None,
        "command": job.command if job else None,
        "hosts": job.hosts if job else None,
        "launched_on": job.launcher.host if job else None,
    }
