"""``muster attach``: follow a run that was started elsewhere, or show its output."""

import argparse
import sys
import time
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode
from torchmuster.runfolder import RunFolder

_LOOK_EVERY_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster attach``."""
    parser.description = (
        f"{parser.description}\nPrints the earlier output first. Ctrl-C detaches without stopping "
        "the run.\nThe exit code is the run's."
    )
    parsers.show_examples(
        parser,
        [
            "muster attach                      the active run in ./runs, else the newest",
            "muster attach 20260131-1200        a unique part of the run's id",
        ],
    )
    parsers.add_run_argument(parser, default="the active run, else the newest")
    parser.set_defaults(run=_run_attach)


def _run_attach(options: argparse.Namespace) -> int:
    run = choose_run(options.which, options.runs, "running")
    try:
        return follow(run)
    except KeyboardInterrupt:
        output.say(f"\nmuster: detached from {run.id}; to stop it: muster stop {run.id}")
        return ExitCode.GOOD


def follow(run: RunFolder) -> int:
    """Print the output of a run until it is over; return its exit code."""
    from torchmuster.launch.history import run_state

    place = 0
    job = run_state.await_job(run)
    if job is not None and not job.launcher.is_of_this_machine:
        output.say(
            f"muster: the run was launched on {job.launcher.host}; if its launcher is killed there, "
            "this command notices only after some minutes"
        )
    while True:
        state = run_state.read_state(
            run
        )  # before the last read of the log, so that nothing is missed
        place = _show_more(run.console, place)
        starting = state is None and job is not None and job.launcher.process() is not None
        if not starting and (state is None or not state.active):
            break
        time.sleep(_LOOK_EVERY_S)
    if state is None:
        output.say(f"muster: {run.id} never started, and its launcher is gone")
        return ExitCode.FAILED
    if state.phase == "died":
        output.say(f"muster: {state.headline}; muster stop {run.id} kills processes that are left")
        return ExitCode.FAILED
    return ExitCode.FAILED if state.exit_code is None else state.exit_code


def _show_more(path: Path, place: int) -> int:
    if not path.exists():
        return place
    with path.open("rb") as stream:
        stream.seek(place)
        while data := stream.read(1 << 16):
            sys.stdout.buffer.write(data)
            place += len(data)
    sys.stdout.flush()
    return place
