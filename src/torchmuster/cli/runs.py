"""``muster runs``: list the runs in a folder and their state."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, RunsOptions, command, flag
from torchmuster.devices.claims import Claims
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.errors import ExitCode
from torchmuster.launch.history import run_state
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.units import format_seconds, plural

NEWEST = 20
_OF_STATE = ("phase", "exit_code", "headline", "started_unix_s", "since_unix_s")


@dataclass(frozen=True, kw_only=True)
class RunsCommandOptions(RunsOptions, JsonOptions):
    """The flags of ``muster runs``."""

    all: bool = flag(f"list all runs, not only the newest {NEWEST}", default=False)


@command(RunsCommandOptions, examples=["muster runs", "muster runs --json"])
def run(options: RunsCommandOptions) -> int:
    """Print the runs, the newest first."""
    runs = list_runs(options.runs)
    shown = runs if options.all else runs[:NEWEST]
    line = read_tickets(Claims.here(os.environ).queue)
    if options.json:
        output.print_json([_as_json(folder, line) for folder in shown])
        return ExitCode.GOOD
    if not shown:
        output.print_text(f"no runs in {options.runs}; to start one: muster run script.py")
        return ExitCode.GOOD
    output.print_table([_cells(folder, line) for folder in shown])
    if len(runs) > len(shown):
        output.print_text(f"… {len(runs) - len(shown)} older runs: muster runs --all")
    return ExitCode.GOOD


def _place_in_line(folder: RunFolder, line: Sequence[WaitingRequest]) -> dict[str, object] | None:
    """Return for what a run waits in the line of this host, and since when; None if it does not."""
    path = str(folder.path.resolve())
    for position, waiting in enumerate(line, start=1):
        if waiting.run == path:
            return {
                "place": position,
                "of": len(line),
                "for": str(waiting.request),
                "since_unix_s": waiting.since_unix_s,
            }
    return None


def _cells(folder: RunFolder, line: Sequence[WaitingRequest]) -> tuple[str, str, str, str]:
    """Return the cells of a run, safe to print: a folder may belong to another user."""
    job, state = run_state.read_job(folder), run_state.read_state(folder)
    details = printable(job.shown) if job else ""
    if state is None:
        return folder.id, "unknown", "-", details
    end = time.time() if state.active else state.since_unix_s
    took = format_seconds(max(0.0, end - state.started_unix_s))
    if state.restarts:
        took += f", {plural(state.restarts, 'restart')}"
    waiting = _place_in_line(folder, line)
    if state.phase == "waiting" and waiting is not None:
        details = (
            f"place {waiting['place']} of {waiting['of']}, waits for {waiting['for']}: {details}"
        )
    elif state.phase in ("failed", "died"):
        details = state.headline.partition("\n")[0]
    elif state.active and state.hang is not None:
        details = printable([state.hang.text])
    return folder.id, state.phase, took, details


def _as_json(folder: RunFolder, line: Sequence[WaitingRequest]) -> dict[str, object]:
    job, state = run_state.read_job(folder), run_state.read_state(folder)
    is_hung = state is not None and state.active and state.hang is not None
    facts: dict[str, object] = {
        "id": folder.id,
        "folder": str(folder.path.resolve()),
        "waiting": _place_in_line(folder, line),
        "restarts": state.restarts if state is not None else 0,
        "hangs": is_hung,
        "command": job.command if job else None,
        "hosts": job.hosts if job else None,
        "launched_on": job.launcher.host if job else None,
    }
    for name in _OF_STATE:
        facts[name] = getattr(state, name, None)
    return facts
