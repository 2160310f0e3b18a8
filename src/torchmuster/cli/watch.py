"""``muster watch``: monitor a run live, on the terminal or in a browser, with alerts."""

import argparse
import contextlib
import dataclasses
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from torchmuster.cli import output, parsers, reporting, serving_flags
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode, Impossible

if TYPE_CHECKING:
    from torchmuster.monitor.views.run_picture import RunPicture

_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster watch``."""
    parser.description = (
        f"{parser.description}\nReads only the run folder and does not affect the run. "
        "Ctrl-C exits."
    )
    parsers.show_examples(
        parser,
        [
            "muster watch                       curves, where the time goes, ranks, alerts",
            "muster watch --once                print a snapshot as text",
            "muster watch --browser             show the run as a live page",
            "muster watch --report r.html       write a self-contained page, for a ticket",
            "muster watch --lines --webhook https://hooks.example/…   send alerts to a chat",
        ],
    )
    parsers.add_run_argument(parser, default="the active run, else the newest")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print a snapshot as text, and exit")
    how.add_argument(
        "--lines",
        action="store_true",
        help="print only alerts, one per line: for a log, or in the background",
    )
    how.add_argument("--browser", action="store_true", help="serve a live page, and print its URL")
    how.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a self-contained page, like the report at a run's end, and exit",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="also send alerts to this URL, in Slack's format"
    )
    parser.add_argument("--bell", action="store_true", help="ring the terminal bell on alerts")
    serving_flags.add_serving_flags(parser.add_argument_group("with --browser"), port=0)
    parser.set_defaults(run=_run_watch)


def _run_watch(options: argparse.Namespace) -> int:
    from torchmuster.monitor.alerts.watching import Webhook
    from torchmuster.monitor.views.run_picture import RunWatch
    from torchmuster.monitor.views.run_screen import run_screen

    _refuse_flags_without_browser(options)
    run = choose_run(options.which, options.runs, "running")
    if options.report is not None:
        reporting.write(run, options.report)
        output.say(f"muster: report in {options.report}")
        return ExitCode.GOOD
    watch = RunWatch(run)
    if options.once:
        output.print_styled(run_screen(watch.look(time.time()), output.width()))
        return ExitCode.GOOD
    with contextlib.ExitStack() as stack:
        webhook = stack.enter_context(Webhook(options.webhook)) if options.webhook else None
        if options.browser:
            show = _in_browser(stack, options)
        else:
            show = _watch_lines if options.lines or not sys.stdout.isatty() else _live(stack)
        told = ""
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                picture = watch.look(time.time())
                show(picture)
                if options.bell and picture.news:
                    output.ring()
                if webhook is not None:
                    webhook.send(picture.news)
                    if webhook.trouble and webhook.trouble != told:
                        output.say(f"muster: {webhook.trouble}")
                    told = webhook.trouble
                if picture.is_over and not options.browser:
                    break  # the page stays available after the run
                time.sleep(_EVERY_S)
    return ExitCode.GOOD


def _refuse_flags_without_browser(options: argparse.Namespace) -> None:
    elsewhere = options.address != serving_flags.HERE_ONLY
    if (elsewhere or options.port or options.token_file or options.certificate) and (
        not options.browser
    ):
        raise Impossible(
            "--address, --port, --token-file and --certificate work only with --browser",
            why="without --browser nothing is served",
            fix=f"muster watch {options.which or ''} --browser …".replace("  ", " "),
        )


def _watch_lines(picture: "RunPicture") -> None:
    """Print new and resolved alerts, one per line, with the fix below."""
    clock = time.strftime("%H:%M:%S")
    for news in picture.news:
        word = news.alert.severity if news.raised else "over"
        output.print_text(f"{clock} {word}: {news.summary}")
        if news.raised and news.fix:
            output.print_text(f"{'':8} fix: {news.fix}")


def _live(stack: contextlib.ExitStack) -> Callable[["RunPicture"], None]:
    """Return a function that redraws a run in place on the terminal."""
    from rich.console import Console
    from rich.live import Live

    from torchmuster.monitor.views.run_screen import run_screen

    live = stack.enter_context(
        Live(console=Console(), auto_refresh=False, vertical_overflow="crop")
    )
    return lambda picture: live.update(
        output.without_controls(run_screen(picture, output.width())), refresh=True
    )


def _in_browser(
    stack: contextlib.ExitStack, options: argparse.Namespace
) -> Callable[["RunPicture"], None]:
    """Serve a live page and return the function that updates it."""
    from torchmuster.monitor.serving import Access, serving
    from torchmuster.monitor.views.live_page import LivePage

    access = Access(
        what="pages",
        address=options.address,
        port=options.port,
        token=serving_flags.token_from(options.token_file),
        tls=serving_flags.tls_from(options.certificate),
    )
    if access.token is None and not access.is_loopback:
        access = dataclasses.replace(access, token=secrets.token_urlsafe(24))
    page = LivePage()
    port = stack.enter_context(serving(access, page.served()))
    scheme = "http" if access.tls is None else "https"
    token = "" if access.token is None else f"#{quote(access.token, safe='')}"
    address = f"{scheme}://{_watch_name(access.address)}:{port}/{token}"

    def show(picture: "RunPicture") -> None:
        nonlocal address
        page.show(picture)
        if address:  # printed once, when there is something to see
            output.say("muster: open this in a browser; Ctrl-C stops the page, not the run")
            output.print_text(address)
            address = ""

    return show


def _watch_name(address: str) -> str:
    """Return an address as in a URL; for a wildcard address, this host's name."""
    if address in ("0.0.0.0", "::"):  # noqa: S104  # read, not bound to
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address
