"""Launching a job from beginning to end: the run folder, the signals, the supervisor, the last word."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import from_error
from torchmuster.launch import wire
from torchmuster.launch.channel import Arrive, Channel, Transport
from torchmuster.launch.network.reach import several
from torchmuster.launch.spec import JobSpec
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

if TYPE_CHECKING:
    from torchmuster.launch import ledger
    from torchmuster.launch.supervisor import Outcome
    from torchmuster.launch.voice import TerminalVoice


class Course(Protocol):
    """What is done with the machines: a run (``Supervisor``), or a check of the group."""

    token: str

    @property
    def stop(self) -> Callable[[str], None]:
        """Ask for the end, and say why; asked a second time, without any grace."""

    @property
    def pass_on(self) -> Callable[[str], None]:
        """Pass a signal on to every rank."""

    async def run(self) -> "Outcome":
        """Do the whole of it."""


class MakeCourse(Protocol):
    """What makes a course, once the machines have been called."""

    def __call__(
        self,
        spec: JobSpec,
        transport: Transport,
        voice: "TerminalVoice",
        *,
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None],
    ) -> Course:
        """Return the course."""


def launch(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    make_voice: Callable[[RunFolder], "TerminalVoice"],
    make_course: MakeCourse | None = None,
) -> int:
    """Launch a job and stay with it until it is over; return the exit code of the command.

    With ``make_course``, something else than a run is done with the machines.
    """

    async def work() -> int:
        # The machines are called first: keepers start while this process imports what it needs.
        called = _Called(transport)
        await called.call()
        return await _launch(spec, called, run, make_voice(run), make_course)

    return asyncio.run(work())


class _Called:
    """A transport whose machines were called before anybody was there to take them in."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._early: list[tuple[int, Channel]] = []
        self._arrive: Arrive = lambda place, channel: self._early.append((place, channel))
        self._failed: MusterError | None = None

    async def call(self) -> None:
        """Call the machines; what goes wrong is told when somebody takes them in."""
        try:
            await self._transport.open(lambda place, channel: self._arrive(place, channel))
        except MusterError as error:
            self._failed = error

    @property
    def places(self) -> Sequence[str]:
        """The machines that are expected."""
        return self._transport.places

    async def open(self, arrive: Arrive) -> None:
        """Take in those that came already, and then all others."""
        if self._failed is not None:
            raise self._failed
        self._arrive = arrive
        for place, channel in self._early:
            arrive(place, channel)

    async def reopen(self, place: int) -> None:
        """Call a machine again that was lost."""
        await self._transport.reopen(place)

    def waiting_for(self, place: int) -> str:
        """Say in a few words why a machine is not here yet."""
        return self._transport.waiting_for(place)

    def gave_up(self, place: int) -> wire.Trouble | None:
        """Return why a machine will not come."""
        return self._transport.gave_up(place)

    def rejoins(self, place: int) -> bool:
        """Say whether a machine that was lost may come again by itself."""
        return self._transport.rejoins(place)

    async def close(self) -> None:
        """End everything that was opened."""
        await self._transport.close()


async def _launch(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    voice: "TerminalVoice",
    make_course: MakeCourse | None,
) -> int:
    from torchmuster.launch import ledger
    from torchmuster.launch.supervisor import Supervisor

    began = time.monotonic()
    diary = ledger.Diary(run)
    logs = str(run.logs.resolve())
    make_course = make_course or Supervisor
    course = make_course(spec, transport, voice, run_id=run.id, logs=logs, on_phase=diary.phase)
    slurm_job = os.environ.get("SLURM_JOB_ID")
    ledger.write_job(run, spec, token=course.token, slurm_job=slurm_job)
    with voice.speaking():
        voice.say(f"run {run.id}")
        try:
            with _signals(course, voice):
                outcome = await course.run()
        except MusterError as error:
            voice.show(from_error(error))
            diary.ended("failed", error.exit_code, error.what)
            return error.exit_code
        except (
            asyncio.CancelledError
        ):  # Ctrl-C before anybody was there to ask for the end politely
            diary.ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
            raise
        except BaseException as error:
            diary.ended("failed", ExitCode.FAILED, f"the launcher failed: {error!r}")
            raise
        voice.finish()
        return _conclude(outcome, diary, voice, run, time.monotonic() - began)


def _conclude(
    outcome: "Outcome",
    diary: "ledger.Diary",
    voice: "TerminalVoice",
    run: RunFolder,
    took_s: float,
) -> int:
    took = format_seconds(took_s)
    if outcome.good and outcome.words:
        diary.ended("finished", ExitCode.GOOD, outcome.words)
        return ExitCode.GOOD
    if outcome.good:
        voice.say(f"finished well in {took}; logs in {_shown(run.logs)}")
        diary.ended("finished", ExitCode.GOOD, "finished well")
        return ExitCode.GOOD
    if outcome.stopped:
        voice.say(f"stopped after {took}; {_left(outcome.left)}")
        diary.ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
        return ExitCode.INTERRUPTED
    if outcome.words:
        diary.ended("failed", ExitCode.FAILED, outcome.words)
        return ExitCode.FAILED
    assert outcome.finding is not None
    voice.show([outcome.finding])
    diary.ended("failed", ExitCode.FAILED, outcome.finding.what)
    return ExitCode.FAILED


def _left(machines: Sequence[str]) -> str:
    if not machines:
        return "nothing of it is running any more"
    return f"given up: {several(machines)}, where its keeper ends it as soon as it can"


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


@contextlib.contextmanager
def _signals(course: Course, voice: "TerminalVoice") -> Iterator[None]:
    """Turn signals into requests for as long as the run lasts."""
    loop = asyncio.get_running_loop()

    def stop(why: str) -> None:
        voice.say(f"{why}: ending all ranks (once more to end them at once)")
        course.stop(why)

    def suspend() -> None:
        voice.say("a run cannot be suspended; to get the terminal back: --detach, muster attach")

    actions = {
        "SIGINT": (stop, "Ctrl-C"),
        "SIGTERM": (stop, "asked to end (SIGTERM)"),
        "SIGUSR1": (course.pass_on, "SIGUSR1"),
        "SIGUSR2": (course.pass_on, "SIGUSR2"),
    }
    known: list[signal.Signals] = []
    for name, (action, argument) in actions.items():
        with contextlib.suppress(AttributeError, NotImplementedError):
            number = getattr(signal, name)
            loop.add_signal_handler(number, action, argument)
            known.append(number)
    with contextlib.suppress(AttributeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGTSTP, suspend)
        known.append(signal.SIGTSTP)
        # Whoever started it with nohup, or --detach, has said that a hangup should do nothing.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, stop, "the terminal has gone")
            known.append(signal.SIGHUP)
    try:
        yield
    finally:
        for number in known:
            loop.remove_signal_handler(number)
