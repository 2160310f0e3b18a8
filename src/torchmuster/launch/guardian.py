"""The guardian: a process that only waits for the launcher, and starts it again should it be killed.

It is the process that somebody started. The launcher is its child, forked before anything heavy is
imported, in a process group of its own: every signal reaches it through the guardian, and only once. An
end that was asked for is an end; a death by SIGKILL, or by a fault, is not. What the dead launcher left is
ended before another one goes on in the same run folder.

Linux only: elsewhere a process cannot be told of its parent's death, nor inherit orphans.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status, render
from torchmuster.launch.spec import JobSpec
from torchmuster.runfolder import RunFolder

if TYPE_CHECKING:
    from torchmuster.launch.restarts import Attempt
    from torchmuster.launch.standing import Standing

Work = Callable[[int], int]
Say = Callable[[str], None]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_PASSED_ON = (*_ENDS, *_WARNINGS, signal.SIGTSTP)
# Keepers that no longer hear the launcher end what they started; then there is force.
_GONE_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.02
_STOP_MARK = ".stop-asked"


def is_possible() -> bool:
    """Say whether this system can have a guardian."""
    return sys.platform == "linux"


def guarded(run: RunFolder, spec: JobSpec, work: Work, say: Say) -> int:
    """Do the work in a child, again if it is killed; return its exit code.

    ``work`` is told how often it was started before. In the child this returns what ``work`` returns, so
    that the rest of the command goes on there as it would have done.
    """
    (run.path / _STOP_MARK).unlink(missing_ok=True)
    return _Guardian(run, spec, say).watch(work)


def stop_for_good(run: RunFolder) -> None:
    """Leave word that a run's launcher, should it be killed now, is not to be started again."""
    with contextlib.suppress(OSError):
        (run.path / _STOP_MARK).touch()


class _Guardian:
    def __init__(self, run: RunFolder, spec: JobSpec, say: Say) -> None:
        self._run = run
        self._spec = spec
        self._say_here = say
        self._child: int | None = None
        self._asked: signal.Signals | None = None  # the last signal that was to end the run
        self._times_asked = 0
        self._history: list[Attempt] = []
        self._standing: Standing | None = None  # when the launcher was last killed

    def watch(self, work: Work) -> int:
        """Have the work done; return the exit code of the command."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with self._passing_on() as handlers:
            for number in itertools.count():
                began_unix_s = time.time()
                if not self._fork(handlers):
                    return work(number)
                code = self._await_child()
                if code >= 0:
                    return code
                if (ended := self._had_ended(began_unix_s)) is not None:
                    return ended
                if not self._may_start_again(signal.Signals(-code)):
                    return self._ended(signal.Signals(-code))
        raise AssertionError("unreachable")

    # ---- the child

    def _fork(self, handlers: dict[signal.Signals, object]) -> bool:
        """Start the child; return whether this is still the guardian."""
        sys.stdout.flush()
        sys.stderr.flush()
        guardian = os.getpid()
        # No signal may come before it is known where to pass it on to.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        self._child = os.fork()
        if self._child == 0:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # as it was given
            os.setpgid(0, 0)
            # It is not in the foreground of the terminal, to which it may write all the same.
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            # Heeded while there are ranks. Keepers would inherit that they are ignored, but no handler.
            for number in _WARNINGS:
                signal.signal(number, lambda *_: None)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guardian:
                os._exit(ExitCode.INTERRUPTED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return self._child != 0

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[dict[signal.Signals, object]]:
        """Pass signals on for as long as there is a child; yields what was done with them before."""
        me = os.getpid()
        before: dict[signal.Signals, object] = {}
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, self._pass_on)
        try:
            yield before
        finally:
            if os.getpid() == me:  # the child has its own
                for number, handler in before.items():
                    signal.signal(number, handler)  # type: ignore[arg-type]  # as it was given

    def _pass_on(self, number: int, _: object) -> None:
        if number in _ENDS or (number == signal.SIGUSR1 and self._child is None):
            self._asked = signal.Signals(number)
            self._times_asked += 1
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _await_child(self) -> int:
        """Return the child's exit code, negative for a signal; orphans are taken in and let go."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._child:
                self._child = None
                return os.waitstatus_to_exitcode(status)

    # ---- after its death

    def _had_ended(self, began_unix_s: float) -> int | None:
        """Return the exit code of a run that was over when its launcher was killed."""
        from torchmuster.launch import ledger

        state = ledger.read_state(self._run)
        if state is None or state.active or state.since_unix_s < began_unix_s:
            return None  # the end may be that of an earlier start in the same folder
        if state.exit_code is not None:
            self._end_what_is_left()
        return state.exit_code  # one that died has none

    def _may_start_again(self, killed_by: signal.Signals) -> bool:
        """End what is left, and decide; after the pause, if there is one."""
        from torchmuster.launch import ledger, restarts, standing
        from torchmuster.launch.rank_logs import mark_restart

        if self._is_wanted_dead(killed_by):
            return False
        self._take_over()
        self._say(f"the launcher was killed ({killed_by.name}); ending what it left")
        self._end_what_is_left()
        before = self._standing or standing.Standing()
        now = standing.look(self._spec, self._run.metrics, since_unix_s=time.time(), known=before)
        newer = now.checkpoint not in (None, before.checkpoint)
        self._standing = now
        failed = restarts.Attempt(finding=_finding(killed_by), got_on=newer, saved=now.saved)
        self._history.append(failed)
        chosen = restarts.decide(self._history, max_restarts=self._spec.max_restarts)
        if chosen.value is None:
            self._give_up(restarts.with_reason(failed.finding, chosen.reason))
            return False
        self._say(restarts.announcement(failed, chosen.value, chosen.reason))
        ledger.note(self._run, ledger.RESTART, headline=failed.finding.what, from_step=failed.saved)
        mark_restart(self._run.logs)
        deadline = time.monotonic() + chosen.value
        while time.monotonic() < deadline and self._asked is None:
            time.sleep(_LOOK_EVERY_S)
        return not self._is_wanted_dead(killed_by)

    def _is_wanted_dead(self, killed_by: signal.Signals) -> bool:
        marked = (self._run.path / _STOP_MARK).exists()
        asked = (*_ENDS, signal.SIGUSR1)
        return marked or self._asked is not None or killed_by in asked

    def _ended(self, killed_by: signal.Signals) -> int:
        """Say how it ended, where the launcher cannot any more."""
        from torchmuster.launch import ledger

        if not self._is_wanted_dead(killed_by):
            return ExitCode.FAILED
        self._end_what_is_left()
        warned = signal.SIGUSR1 in (self._asked, killed_by)
        code = ExitCode.SAVED if warned else ExitCode.INTERRUPTED
        ledger.Diary(self._run).ended("stopped", code, "stopped on request")
        return code

    def _give_up(self, finding: Finding) -> None:
        from torchmuster.launch import evidence, ledger

        for line in render([finding]).splitlines():
            self._say(line, whole=True)
        evidence.keep_failure(self._run, len(self._history) - 1, finding, ())
        ledger.Diary(self._run).ended("failed", ExitCode.FAILED, finding.what)

    def _take_over(self) -> None:
        """Be the run's launcher in its folder, so that it is seen to be alive and can be stopped."""
        from torchmuster.launch import ledger

        ledger.take_over(self._run)
        ledger.Diary(self._run).phase("starting")

    def _end_what_is_left(self) -> None:
        """End all of the run on this machine; ssh's and keepers here end when those elsewhere have.

        They are children of this process now, as their own parent is dead.
        """
        import psutil

        from torchmuster.launch import ledger
        from torchmuster.launch.keeper import sweep

        job = ledger.read_job(self._run)
        if job is not None and job.token:
            sweep.kill(job.token, within_s=_GONE_WITHIN_S)
        began_s, asked_before, killed = time.monotonic(), self._times_asked, False
        while _reap():
            waited_s = time.monotonic() - began_s
            asked = self._times_asked > asked_before
            children = psutil.Process().children(recursive=True)
            if asked or (waited_s > _GONE_WITHIN_S and not killed):
                sweep.send(children, signal.SIGKILL)
                killed = True
            if asked:
                return
            if waited_s > 2 * _GONE_WITHIN_S:  # as in an uninterruptible wait for a disk
                left = ", ".join(str(child.pid) for child in children)
                self._say(f"given up: the system does not end process {left}")
                return
            time.sleep(_LOOK_EVERY_S)

    def _say(self, text: str, *, whole: bool = False) -> None:
        line = text if whole else f"muster: {text}"
        self._say_here(line)
        with contextlib.suppress(OSError), self._run.console.open("a", encoding="utf-8") as console:
            console.write(f"{line}\n")


def _finding(killed_by: signal.Signals) -> Finding:
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"the launcher was killed ({killed_by.name})",
        why="somebody killed it, or the machine had no memory left"
        if killed_by is signal.SIGKILL
        else "a fault in it, or in a library that it uses",
        fix="journalctl and dmesg on this machine may say who did it",
    )


def _reap() -> bool:
    """Let go of children that have ended; return whether some live."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
