"""Write the HTML report of a run at its end. A failure here does not change the run's exit code."""

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from torchmuster.cli import output
from torchmuster.errors import Impossible
from torchmuster.runfolder import RunFolder, write_atomically

_ENDING = (signal.SIGINT, signal.SIGTERM)


def with_report(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work of a run, then write the report into its folder unless it already exists."""
    try:
        return work()
    finally:
        # The run is over, and its exit code is known.
        before = [signal.signal(number, signal.SIG_IGN) for number in _ENDING]
        _leave_report(run)
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)


def write(run: RunFolder, path: Path) -> None:
    """Write the report of a run to a file."""
    from torchmuster.monitor.views.run_report import run_report

    try:
        write_atomically(path, run_report(run), durable=False)
    except OSError as error:
        raise Impossible(
            f"cannot write the report to {path}",
            why=error.strerror or str(error),
            fix="give a file in a writable folder, on a disk with free space",
        ) from error


def _leave_report(run: RunFolder) -> None:
    try:
        if _is_due(run):
            write(run, run.report)
    except Exception as error:  # a full disk, a damaged file: ignored for the run
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            console.write(f"muster: no report was written: {error!r}\n")
    if sys.stderr.isatty() and run.report.exists():
        output.say(f"muster: report in {run.report}")


def _is_due(run: RunFolder) -> bool:
    """Return whether a run is over and has no up-to-date report yet."""
    with contextlib.suppress(OSError):  # fast path
        if run.report.stat().st_mtime >= run.events.stat().st_mtime:
            return False
    from torchmuster.launch.history import run_state

    state = run_state.read_state(run)
    if state is None or state.active:
        return False
    # Of a script that ended well and logged no steps there is nothing to report.
    return state.phase != "finished" or (run.metrics / "steps.jsonl").exists()
