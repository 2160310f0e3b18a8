"""Going on without the terminal: the launcher as a process of its own."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from torchmuster.cli import output
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder

# So long the terminal stays to see whether the run gets going at all.
_STAY_S = 60.0
_SAY_EVERY_S = 9.0


def detach(run: RunFolder, work: Callable[[], int]) -> int:
    """Do the work in a process that outlives this one; return once it is running, or has failed."""
    if not hasattr(os, "fork"):
        raise Impossible(
            "--detach does not work on this system",
            why="it needs fork, which Windows does not have",
            fix="leave the window open, or run it as a scheduled task",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # A Ctrl-C that comes with the fork waits until somebody can tell what was left to itself.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        _work_alone(run, work)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        state = _see_it_begin(run, child)
    except KeyboardInterrupt:  # said before: that leaves the run to itself
        state = run_state.read_state(run)
    # Before its first word there is no state; a process that is there has one soon.
    return _tell(run, state, begun=state is not None or _lives(child))


def _work_alone(run: RunFolder, work: Callable[[], int]) -> None:
    """Do the work as a process of its own session, without a terminal."""
    code = int(ExitCode.FAILED)
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nobody's terminal is its affair any more
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        code = work()
    except BaseException:
        with contextlib.suppress(OSError), run.console.open("a", encoding="utf-8") as console:
            traceback.print_exc(file=console)  # there is no terminal left that could show it
    finally:
        os._exit(code)


def _see_it_begin(run: RunFolder, child: int) -> run_state.State | None:
    """Wait until the run is under way or over; None if it ended without a word."""
    began = said = time.monotonic()
    while (now := time.monotonic()) - began < _STAY_S:
        gone = os.waitpid(child, os.WNOHANG)[0] != 0
        state = run_state.read_state(run)
        if gone or (state is not None and (state.phase == "running" or not state.active)):
            return state
        if now - said > _SAY_EVERY_S:
            said = now
            phase = state.phase if state else "starting"
            output.say(f"muster: not running yet ({phase}); Ctrl-C leaves it to itself")
        time.sleep(0.05)
    return run_state.read_state(run)


def _lives(child: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(child, os.WNOHANG)[0] == 0
    return False


def _tell(run: RunFolder, state: run_state.State | None, *, begun: bool) -> int:
    active = state.active if state is not None else begun
    if not active and (state is None or state.exit_code != ExitCode.GOOD):
        if run.console.exists():
            sys.stderr.write(run.console.read_text(encoding="utf-8", errors="replace"))
        else:
            output.say("muster: the run ended before it began, without a word")
        return state.exit_code if state and state.exit_code is not None else ExitCode.FAILED
    print(run.id)
    if not active:
        output.say(f"muster: it has already finished well; what it showed: muster attach {run.id}")
        return ExitCode.GOOD
    words = "running" if state and state.phase == "running" else "not running yet, but goes on"
    output.say(f"muster: {words} without this terminal")
    output.say(f"muster: to follow it: muster attach {run.id}")
    output.say(f"muster: to end it:    muster stop {run.id}")
    return ExitCode.GOOD
