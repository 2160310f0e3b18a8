"""``muster watch``: a run as it goes, live on the terminal, and news of what needs somebody."""

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
from torchmuster.errors import ExitCode, Impossible
from torchmuster.redaction import harmless
from torchmuster.runfolder import find_run

if TYPE_CHECKING:
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
            "muster watch last --browser        the same as a page that keeps itself up to date",
            "muster watch last --report r.html  as a page that needs nothing else: for a mail, a ticket, an archive",
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
    how.add_argument(
        "--browser", action="store_true", help="show it as a page, at the address that is printed"
    )
    how.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a page that needs nothing else, as every run leaves one at its end, and end",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="send news there as well, as Slack and others take it"
    )
    parser.add_argument("--bell", action="store_true", help="ring the terminal's bell at news")
    serving_flags.add_serving_flags(parser.add_argument_group("with --browser"), port=0)
    parser.set_defaults(run=_run_watch)


def _run_watch(options: argparse.Namespace) -> int:
    from torchmuster.monitor.alerts.watching import Webhook
    from torchmuster.monitor.views.run_picture import RunWatch
    from torchmuster.monitor.views.run_screen import run_screen

    _refuse_flags_without_browser(options)
    run = find_run(options.which, options.runs)
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
                    print("\a", end="", file=sys.stderr, flush=True)
                if webhook is not None:
                    webhook.send(picture.news)
                    if webhook.trouble and webhook.trouble != told:
                        output.say(f"muster: {webhook.trouble}")
                    told = webhook.trouble
                if picture.is_over and not options.browser:
                    break  # a page stays for whoever wants to see the end
                time.sleep(_EVERY_S)
    return ExitCode.GOOD


def _refuse_flags_without_browser(options: argparse.Namespace) -> None:
    elsewhere = options.address != serving_flags.HERE_ONLY
    if (elsewhere or options.port or options.token_file or options.certificate) and (
        not options.browser
    ):
        raise Impossible(
            "--address, --port, --token-file and --certificate are for --browser",
            why="without it nothing is served",
            fix=f"muster watch {options.which} --browser …",
        )


def _watch_lines(picture: "RunPicture") -> None:
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

    from torchmuster.monitor.views.run_screen import run_screen

    live = stack.enter_context(
        Live(console=Console(), auto_refresh=False, vertical_overflow="crop")
    )
    return lambda picture: live.update(run_screen(picture, output.width()), refresh=True)


def _in_browser(
    stack: contextlib.ExitStack, options: argparse.Namespace
) -> Callable[["RunPicture"], None]:
    """Serve a page and say where; return what shows a run on it."""
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
        if address:  # told once, when there is something to see
            output.say("muster: open this in a browser; Ctrl-C ends the watching, not the run")
            print(address, flush=True)
            address = ""

    return show


def _watch_name(address: str) -> str:
    """Return an address as it is written in one for browsers; for all addresses, this machine's name."""
    if address in ("0.0.0.0", "::"):  # noqa: S104  # read, not bound to
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address
