"""``muster top``: show all GPUs and ranks of this machine, or of a run's hosts, live."""

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode, Impossible

if TYPE_CHECKING:
    from torchmuster.monitor.views.top_app import TopApp

# CPU and network usage are rates between two samples, so --once takes two.
_BETWEEN_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster top``."""
    from torchmuster.monitor.views.top_picture import ORDERS

    parser.description = (
        f"{parser.description}\nWithout RUN, shows this machine and its active runs. Does not "
        "affect runs.\nThe keys are shown at the bottom of the screen."
    )
    parsers.show_examples(
        parser,
        [
            "muster top                    this machine's GPUs, and the ranks of all runs",
            "muster top last               the active run, else the newest, on all its hosts",
            "muster top --once             print a snapshot as text",
            "muster top --sort others      ranks that wait most for others first",
        ],
    )
    parsers.add_run_argument(parser, default="all active runs")
    parser.add_argument("--once", action="store_true", help="print a snapshot as text, and exit")
    parser.add_argument(
        "--sort",
        choices=ORDERS,
        default="rank",
        help="order of the ranks: by rank (default), or largest value first",
    )
    parser.add_argument(
        "--interval",
        type=parsers.interval,
        default=2.0,
        metavar="SECONDS",
        help="refresh interval (default: 2)",
    )
    parser.set_defaults(run=_run_top)


def _run_top(options: argparse.Namespace) -> int:
    from torchmuster.devices import snapshot
    from torchmuster.monitor.views.top_picture import TopWatch
    from torchmuster.monitor.views.top_screen import TopView, top_screen

    run = choose_run(options.which, options.runs, "running") if options.which else None
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
            "muster top cannot show a live screen: the package textual is not installed",
            why="textual draws the screen and reads the keys",
            fix="pip install 'torchmuster[watch]', or: muster top --once",
        ) from error
    return TopApp
