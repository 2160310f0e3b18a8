"""``muster watch``: monitor a run live on the terminal, with alerts."""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output, reporting
from torchmuster.cli.options import WhichRunOptions, command, flag
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode

if TYPE_CHECKING:
    from torchmuster.monitor.views.run_picture import RunWatch

_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class WatchOptions(WhichRunOptions):
    """The flags of ``muster watch``."""

    once: bool = flag("print it once as text, as without a terminal", default=False)
    report: Path | None = flag(
        "write a self-contained page, like the report at a run's end, and exit",
        parse=Path,
        metavar="FILE",
    )


@command(
    WatchOptions,
    more="Reads only the run folder and does not affect the run. Ctrl-C exits.",
    examples=[
        "muster watch                       progress, where the time goes, ranks, alerts",
        "muster watch --once                print a snapshot as text",
        "muster watch --report r.html       write a self-contained page, for a ticket",
    ],
)
def run(options: WatchOptions) -> int:
    """Show the run until it is over."""
    from torchmuster.monitor.views.run_picture import RunWatch
    from torchmuster.monitor.views.run_screen import run_screen

    folder = choose_run(options.which, options.runs, active_first=True)
    if options.report is not None:
        reporting.write(folder, options.report)
        output.say(f"muster: report in {options.report}")
        return ExitCode.GOOD
    watch = RunWatch(folder)
    if options.once or not sys.stdout.isatty():
        output.print_styled(run_screen(watch.look(time.time()), output.width()))
        return ExitCode.GOOD
    with suppress(KeyboardInterrupt):
        _draw_until_over(watch)
    return ExitCode.GOOD


def _draw_until_over(watch: "RunWatch") -> None:
    """Redraw the run in place."""
    from rich.console import Console
    from rich.live import Live

    from torchmuster.monitor.views.run_screen import run_screen

    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            picture = watch.look(time.time())
            screen = output.without_controls(run_screen(picture, output.width()))
            live.update(screen, refresh=True)
            if picture.is_over:
                return
            time.sleep(_EVERY_S)
