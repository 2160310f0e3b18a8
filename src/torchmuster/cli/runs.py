"""``muster runs``: list the runs in a folder and their state."""

import time
from dataclasses import dataclass

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, RunsOptions, command, flag
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
    if options.json:
        output.print_json([run_facts(folder) for folder in shown])
        return ExitCode.GOOD
    if not shown:
        output.print_text(f"no runs in {options.runs}; to start one: muster run script.py")
        return ExitCode.GOOD
    output.print_table([_cells(folder) for folder in shown])
    if len(runs) > len(shown):
        output.print_text(f"… {len(runs) - len(shown)} older runs: muster runs --all")
    return ExitCode.GOOD


def _cells(folder: RunFolder) -> tuple[str, str, str, str]:
    """Return the cells of a run, safe to print: a folder may belong to another user."""
    job, state = run_state.read_job(folder), run_state.read_state(folder)
    details = printable(job.shown) if job else ""
    if state is None:
        return folder.id, "unknown", "-", details
    end = time.time() if state.active else state.since_unix_s
    took = format_seconds(max(0.0, end - state.started_unix_s))
    if state.restarts:
        took += f", {plural(state.restarts, 'restart')}"
    if state.phase in ("failed", "died"):
        details = state.headline.partition("\n")[0]
    elif state.active and state.hang is not None:
        details = printable([state.hang.text])
    return folder.id, state.phase, took, details


def run_facts(folder: RunFolder) -> dict[str, object]:
    """Return what ``--json`` prints of a run, here and in ``muster explain``."""
    job, state = run_state.read_job(folder), run_state.read_state(folder)
    facts: dict[str, object] = {
        "id": folder.id,
        "folder": str(folder.path.resolve()),
        "command": job.command if job else None,
        "restarts": state.restarts if state is not None else 0,
        "hangs": state is not None and state.active and state.hang is not None,
    }
    for name in _OF_STATE:
        facts[name] = getattr(state, name, None)
    return facts
