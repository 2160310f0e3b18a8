"""Write the HTML report of a run at its end. A failure here does not change the run's exit code."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from torchmuster.cli import output
from torchmuster.errors import Impossible
from torchmuster.runfolder import RunFolder, write_atomically

_AT_MOST_S = 15.0  # wait for the report at most this long: a disk may hang


def with_report(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work of a run, then write the report into its folder unless it already exists."""
    try:
        return work()
    finally:
        _leave_report(run)


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
    """Write the report in a thread: interrupts and a hanging disk do not change the exit code."""
    over = threading.Event()

    def work() -> None:
        try:
            if _is_due(run):
                write(run, run.report)
        except Exception as error:  # a full disk, a damaged file: ignored for the run
            with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
                console.write(f"muster: no report was written: {error!r}\n")
        finally:
            over.set()

    with contextlib.suppress(Exception), _signals_only(over.set):
        thread = threading.Thread(target=work, name="report", daemon=True)
        thread.start()
        if over.wait(_AT_MOST_S):
            thread.join(0.1)  # nothing left to do, unless it was interrupted
        if sys.stderr.isatty() and run.report.exists():
            output.say(f"muster: report in {run.report}")


def _is_due(run: RunFolder) -> bool:
    """Return whether a run is over and has no up-to-date report yet."""
    with contextlib.suppress(OSError):  # fast path
        if run.report.stat().st_mtime >= run.state.stat().st_mtime:
            return False
    from torchmuster.launch.history import run_state

    state = run_state.read_state(run)
    if state is None or state.active:
        return False
    # Of a script that ended well and logged no steps there is nothing to report.
    return state.phase != "finished" or (run.metrics / "steps.jsonl").exists()


@contextlib.contextmanager
def _signals_only(do: Callable[[], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM only by this call: the run is over and its exit code is known."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: do())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
