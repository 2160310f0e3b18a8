"""``muster watch``: a run as it goes, live on the terminal, and news of what needs somebody."""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode
from torchmuster.redaction import harmless
from torchmuster.runfolder import find

if TYPE_CHECKING:
    from rich.text import Text

    from torchmuster.monitor.views.run_picture import RunPicture

_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster watch``."""
    parser.description = (
        f"{parser.description}\nIt reads the run's folder and nothing else: the run does not notice. "
        "Ctrl-C ends the watching."
    )
    parsers.show_examples(
        parser,
        [
            "muster watch last                  curves, where the time goes, ranks, alerts",
            "muster watch last --once           one look, as text",
            "muster watch last --lines --webhook https://hooks.example/…   tell a chat; print only news",
        ],
    )
    parsers.add_run_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="show it once, and end")
    how.add_argument(
        "--lines",
        action="store_true",
        help="print only news, a line each: for a log, or to leave behind",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="send news there as well, as Slack and others take it"
    )
    parser.add_argument("--bell", action="store_true", help="ring the terminal's bell at news")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchmuster.monitor.alerts.webhook import Webhook
    from torchmuster.monitor.views.run_picture import RunWatch
    from torchmuster.monitor.views.run_screen import screen

    run = find(options.which, options.runs)
    watch = RunWatch(run)
    if options.once:
        _print(screen(watch.look(time.time()), _width()))
        return ExitCode.GOOD
    with contextlib.ExitStack() as stack:
        webhook = stack.enter_context(Webhook(options.webhook)) if options.webhook else None
        show = _lines if options.lines or not sys.stdout.isatty() else _live(stack)
        told = ""
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                picture = watch.look(time.time())
                show(picture)
                if options.bell and picture.news:
                    print("\a", end="", file=sys.stderr, flush=True)
                if webhook is not None:
                    webhook.send(picture.news)
                    if webhook.trouble and webhook.trouble != told:
                        output.say(f"muster: {webhook.trouble}")
                    told = webhook.trouble
                if picture.is_over:
                    break
                time.sleep(_EVERY_S)
    return ExitCode.GOOD


def _lines(picture: "RunPicture") -> None:
    """Print what is new, a line each; the fix below it."""
    clock = time.strftime("%H:%M:%S")
    for news in picture.news:
        word = news.alert.severity if news.raised else "over"
        print(f"{clock} {word}: {harmless(news.summary)}", flush=True)
        if news.raised and news.fix:
            print(f"{'':8} fix: {harmless(news.fix)}", flush=True)


def _live(stack: contextlib.ExitStack) -> Callable[["RunPicture"], None]:
    """Return what shows a run on the terminal, over and over at the same place."""
    from rich.console import Console
    from rich.live import Live

    from torchmuster.monitor.views.run_screen import screen

    live = stack.enter_context(
        Live(console=Console(), auto_refresh=False, vertical_overflow="crop")
    )
    return lambda picture: live.update(screen(picture, _width()), refresh=True)


def _print(text: "Text") -> None:
    from rich.console import Console

    colour = output.wants_colour(sys.stdout)
    console = Console(no_color=not colour, highlight=False, width=_width())
    console.print(text, soft_wrap=True)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 200)
