"""``muster runs``: list the runs in a folder and their state."""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from torchmuster.cli import output, parsers
from torchmuster.cli.config import add_set_flag
from torchmuster.cli.which_run import choose_run
from torchmuster.config.here import SINK_LIBRARIES, check_sinks
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.devices.claims import Claims
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch.history import run_state
from torchmuster.redaction import printable, redact_text
from torchmuster.runfolder import RunFolder, list_runs, refuse_foreign
from torchmuster.units import format_seconds, plural


def add_parser(actions: Any) -> None:
    """Add ``export`` to the actions of ``muster runs``."""
    parser = parsers.add_action(
        actions,
        "export",
        "export a run's metrics to a file or a tracker",
        more="Skips what the run itself has sent (metrics.sinks).\n"
        "Needs only the run folder, so it works after the run and on another network.",
        examples=[
            "muster runs export last --to parquet      metrics/steps.parquet in the run's folder",
            "muster runs export last --to tensorboard  then: tensorboard --logdir runs",
            "muster runs export last --to mlflow --set metrics.mlflow_uri=http://tracker:5000",
            "muster runs export last --to wandb --anew  send everything again, as a new run",
        ],
    )
    parsers.add_run_argument(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(SINK_LIBRARIES),
        metavar="SINK",
        help=f"destination: {', '.join(SINK_LIBRARIES)}",
    )
    parser.add_argument("--anew", action="store_true", help="send everything again, as a new run")
    add_set_flag(parser)
    parser.set_defaults(run=_run_export)


def _run_export(options: argparse.Namespace) -> int:
    from torchmuster.monitor.sinks import sent
    from torchmuster.monitor.sinks.sending import Sending
    from torchmuster.monitor.sinks.sink import open_sink, wanted_by

    run = choose_run(options.which, options.runs, "training")
    refuse_foreign(run, "export")
    if not any((run.metrics / f"{name}.jsonl").is_file() for name in ("steps", "evaluations")):
        raise Impossible(
            f"{run.id} has no metrics",
            why=f"there is neither steps.jsonl nor evaluations.jsonl in {run.metrics}",
            fix="give a run of muster train with at least one step",
        )
    chosen = Flag(flag="--to", path="metrics.sinks", text=options.to)
    resolved = resolve_settings(
        file=run.config if run.config.is_file() else None,
        environment=os.environ,
        flags=[*options.set, chosen],
    )
    check_sinks(resolved)
    wanted = wanted_by(resolved.settings, anew=options.anew)
    with sent.sent_lock(run, options.to):
        if options.anew:
            sent.forget_sent(run, options.to)
        sending = Sending(run, options.to, lambda known: open_sink(options.to, run, wanted, known))
        try:
            sending.open()
            count = sending.send_new(last=True)
        except Exception as error:  # trackers' libraries raise any type
            sending.give_up(error)
            sending.close(finished=False)
            raise MusterError(
                f"cannot send {run.id} to {options.to}",
                why=redact_text(f"{type(error).__name__}: {error}"),
                fix="run the same command again: it continues where this one stopped",
            ) from error
        sending.close(finished=_has_finished(run))
    named = f", as run {sending.run}" if sending.run else ""
    lines = plural(count, "line")
    output.say(f"{lines} of {run.id} sent to {options.to}{named}")
    return ExitCode.GOOD


def _has_finished(run: RunFolder) -> bool:
    state = run_state.read_state(run)
    return state is not None and state.phase == "finished"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster runs`` and its action ``export``."""
    parsers.show_examples(
        parser,
        [
            "muster runs",
            "muster runs --json",
            "muster runs export last --to mlflow    send metrics that MLflow does not have",
        ],
    )
    parsers.add_runs_flag(parser)
    parser.add_argument("--all", action="store_true", help="list all runs, not only the newest 20")
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_runs)
    actions = parser.add_subparsers(title="more", metavar="ACTION")
    add_parser(actions)


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
    if restarts := _runs_restarts(run):
        took += f", {restarts} restart{'s' if restarts > 1 else ''}"
    waiting = _place_in_line(run, line)
    if state.phase == "waiting" and waiting is not None:
        words = f"place {waiting['place']} of {waiting['of']}, waits for {waiting['for']}: {words}"
    failed = state.phase in ("failed", "died")
    return run.id, state.phase, took, state.headline.partition("\n")[0] if failed else words


def _runs_restarts(run: RunFolder) -> int:
    return sum(event.name == run_state.RESTART for event in run_state.read_events(run))


def _runs_as_json(run: RunFolder, line: Sequence[WaitingRequest]) -> dict[str, object]:
    job, state = run_state.read_job(run), run_state.read_state(run)
    return {
        "id": run.id,
        "folder": str(run.path.resolve()),
        "phase": state.phase if state else None,
        "waiting": _place_in_line(run, line),
        "exit_code": state.exit_code if state else None,
        "restarts": _runs_restarts(run),
        "headline": state.headline if state else None,
        "started_unix_s": state.started_unix_s if state else None,
        "since_unix_s": state.since_unix_s if state else None,
        "command": job.command if job else None,
        "hosts": job.hosts if job else None,
        "launched_on": job.launcher.host if job else None,
    }
