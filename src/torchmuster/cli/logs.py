"""``muster logs``: show the output of a run, or follow it."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torchmuster import untrusted
from torchmuster.cli import output
from torchmuster.cli.options import WhichRunOptions, command, flag
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode, Impossible
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_bytes

_LOOK_EVERY_S = 0.1
_SHOWN_BYTES = 256 * 1024
_LONGEST_LINE_BYTES = 64 * 1024


def rank_number(text: str) -> int:
    """Parse the number of a rank."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a rank number")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class LogsOptions(WhichRunOptions):
    """The flags of ``muster logs``."""

    rank: int | None = flag(
        "show the end of this rank's own log (default: the output of all ranks)",
        parse=rank_number,
        metavar="N",
    )
    follow: bool = flag("show new output until the run is over", default=False, aliases=("-f",))


@command(
    LogsOptions,
    more="With --follow, Ctrl-C stops following, not the run, and the exit code is the run's.",
    examples=[
        "muster logs                      the active run in ./runs, else the newest",
        "muster logs 20260131-1200 -f     a unique part of the run's id; until the run is over",
        "muster logs last --rank 17       the end of rank 17's log, wherever it is kept",
    ],
)
def run(options: LogsOptions) -> int:
    """Print the output, and follow it if requested."""
    folder = choose_run(options.which, options.runs, active_first=True)
    path, position = folder.console, 0
    if options.rank is not None:
        path = _rank_log(folder, options.rank)
        position = max(0, path.stat().st_size - _SHOWN_BYTES)
    if position:
        output.print_text(f"… {format_bytes(position)} before this: {path}")
    if not options.follow:
        _show_more(path, position, last=True)
        return ExitCode.GOOD
    try:
        return _follow(folder, path, position)
    except KeyboardInterrupt:
        output.say(f"\nmuster: {folder.id} continues; to stop it: muster stop {folder.reference}")
        return ExitCode.GOOD


def _rank_log(run: RunFolder, rank: int) -> Path:
    """Return the log of a rank, which may be on another host."""
    from torchmuster.launch.history import node_records

    log = run.logs / f"rank-{rank}.log"
    if log.is_file():
        return log
    host_log = node_records.host_of(run, rank)
    if host_log is None:
        raise Impossible(
            f"{run.id} has no log of rank {rank}",
            why=f"{log} does not exist",
            fix=f"muster logs {run.reference}  # shows the output of all ranks",
        )
    # Both come from a host that may have joined from elsewhere, and are to be pasted.
    host, path = printable([host_log.host]), printable([host_log.path_of(rank)])
    raise Impossible(
        f"the log of rank {rank} is on its host: {host}:{path}",
        why="that host does not share the folder of this run",
        fix=f"ssh {host} tail -n 100 -f {path}",
    )


def _follow(run: RunFolder, path: Path, position: int) -> int:
    """Print what is added to a file until the run is over; return the run's exit code."""
    from torchmuster.launch.history import run_state

    job = run_state.read_job(run)
    while True:
        # Before the last read of the log, so that nothing is missed.
        state = run_state.read_state(run)
        over = state is not None and not state.active
        if state is None:
            over = job is None or job.launcher.process() is None
        position = _show_more(path, position, last=over)
        if over:
            break
        time.sleep(_LOOK_EVERY_S)
    if state is None:
        output.say(f"muster: {run.id} never started, and its launcher is gone")
        return ExitCode.FAILED
    if state.phase == "died":
        output.say(
            f"muster: {state.headline}; muster stop {run.reference} kills processes that are left"
        )
        return ExitCode.FAILED
    return ExitCode.FAILED if state.exit_code is None else state.exit_code


def _show_more(path: Path, position: int, *, last: bool) -> int:
    """Print the lines after a position, without terminal control sequences; return the new position."""
    from torchmuster.redaction import printable_line

    try:
        stream = untrusted.open_regular(path)
    except (OSError, untrusted.Unreadable):
        return position
    colour = sys.stdout.isatty()
    with stream:
        stream.seek(position)
        while line := stream.readline(_LONGEST_LINE_BYTES):
            if not (last or line.endswith(b"\n") or len(line) == _LONGEST_LINE_BYTES):
                break  # it is being written
            position += len(line)
            text = line.removesuffix(b"\n").decode("utf-8", errors="replace")
            output.print_coloured(printable_line(text, colour=colour))
    return position
