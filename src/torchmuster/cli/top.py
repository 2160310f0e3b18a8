"""``muster top``: all GPUs and ranks of this machine, or of a run's machines, live."""

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible
from torchmuster.runfolder import find_run

if TYPE_CHECKING:
    from torchmuster.monitor.views.top_app import TopApp

# Shares of processors and traffic are told between two looks: for one look, two are taken.
_BETWEEN_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster top``."""
    from torchmuster.monitor.views.top_picture import ORDERS

    parser.description = (
        f"{parser.description}\nWithout RUN: this machine, and the runs that are going on. It only "
        "reads: nothing notices. The keys are at the foot of the screen."
    )
    parsers.show_examples(
        parser,
        [
            "muster top                    this machine's GPUs, and the ranks of all runs",
            "muster top last               the newest run, on all its machines",
            "muster top --once             one look, as text",
            "muster top --sort others      who waits for others, the most first",
        ],
    )
    parsers.add_run_argument(parser, required=False)
    parser.add_argument("--once", action="store_true", help="show it once as text, and end")
    parser.add_argument(
        "--sort",
        choices=ORDERS,
        default="rank",
        help="order of the ranks: by rank, or the most first",
    )
    parser.add_argument(
        "--interval",
        type=parsers.interval,
        default=2.0,
        metavar="SECONDS",
        help="between looks (2)",
    )
    parser.set_defaults(run=_run_top)


def _run_top(options: argparse.Namespace) -> int:
    from torchmuster.devices import snapshot
    from torchmuster.monitor.views.top_picture import TopWatch
    from torchmuster.monitor.views.top_screen import TopView, top_screen

    run = find_run(options.which, options.runs) if options.which else None
    live = not options.once and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    app = _app() if live else None
    view = TopView(order=options.sort)
    with contextlib.ExitStack() as stack:
        watch = TopWatch(
            options.runs, stack.enter_context(snapshot.listening_to_events()), only=run
        )
        first = watch.look(time.time())
        if app is None:
            time.sleep(_BETWEEN_S)
            output.print_styled(top_screen(watch.look(time.time()), output.width(), view))
            return ExitCode.GOOD
        error = app(
            first, lambda: watch.look(time.time()), every_s=options.interval, view=view
        ).run()
        if error is not None:
            raise error
    return ExitCode.GOOD


def _app() -> "type[TopApp]":
    try:
        from torchmuster.monitor.views.top_app import TopApp
    except ImportError as error:
        raise Impossible(
            "muster top cannot be shown live: the package textual is not installed here",
            why="it draws the screen and reads the keys",
            fix="pip install 'torchmuster[watch]', or: muster top --once",
        ) from error
    return TopApp
