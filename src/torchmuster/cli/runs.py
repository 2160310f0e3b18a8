"""``muster runs``: the runs in a folder, how they go or went."""

import argparse
import time

from torchmuster.cli import output, parsers, runs_export
from torchmuster.errors import ExitCode
from torchmuster.launch.history import run_state
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.units import format_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster runs`` and its action ``export``."""
    parsers.show_examples(
        parser,
        [
            "muster runs",
            "muster runs --json",
            "muster runs export last --to mlflow    send what its tracker has not got",
        ],
    )
    parsers.add_runs_flag(parser)
    parser.add_argument("--all", action="store_true", help="not only the newest 20")
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run)
    actions = parser.add_subparsers(title="more", metavar="ACTION")
    runs_export.add_parser(actions)


def _run(options: argparse.Namespace) -> int:
    runs = list_runs(options.runs)
    shown = runs if options.all else runs[:20]
    rows = [(run, run_state.read_job(run), run_state.read_state(run)) for run in shown]
    if options.json:
        output.print_json([_as_json(*row) for row in rows])
        return ExitCode.GOOD
    if not rows:
        print(f"no runs in {options.runs}; muster run script.py makes the first")
        return ExitCode.GOOD
    table = [_cells(*row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]).rstrip())
    if len(runs) > len(shown):
        print(f"… {len(runs) - len(shown)} older ones: muster runs --all")
    return ExitCode.GOOD


def _cells(
    run: RunFolder, job: run_state.Job | None, state: run_state.State | None
) -> tuple[str, str, str, str]:
    words = printable(job.shown) if job else ""
    if state is None:
        return run.id, "unknown", "-", words
    end = time.time() if state.active else state.since_unix_s
    took = format_seconds(max(0.0, end - state.started_unix_s))
    if restarts := _restarts(run):
        took += f", {restarts} restart{'s' if restarts > 1 else ''}"
    failed = state.phase in ("failed", "died")
    return run.id, state.phase, took, state.headline.partition("\n")[0] if failed else words


def _restarts(run: RunFolder) -> int:
    return sum(event.name == run_state.RESTART for event in run_state.events(run))


def _as_json(
    run: RunFolder, job: run_state.Job | None, state: run_state.State | None
) -> dict[str, object]:
    return {
        "id": run.id,
        "folder": str(run.path.resolve()),
        "phase": state.phase if state else None,
        "exit_code": state.exit_code if state else None,
        "restarts": _restarts(run),
        "headline": state.headline if state else None,
        "started_unix_s": state.started_unix_s if state else None,
        "since_unix_s": state.since_unix_s if state else None,
        "command": job.command if job else None,
        "hosts": job.hosts if job else None,
        "launched_on": job.launcher.host if job else None,
    }
