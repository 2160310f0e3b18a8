"""Run state in the run folder: what was launched, by which process, its phase, and its events.

``muster runs``, ``logs``, ``stop``, ``watch`` and ``explain`` know a run only from these files, so they must be right even
if the launcher was killed: whether it is alive comes from the system or its heartbeats, not from the file. What the events
add up to is computed in :class:`EventSummary` for all of them.
"""

import asyncio
import contextlib
import io
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import psutil

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.redaction import redact_command, redact_mapping, redact_text
from torchmuster.runfolder import RunFolder, write_atomically
from torchmuster.units import format_seconds

# The phases of a run that is not over.
ACTIVE = ("submitted", "waiting", "joining", "starting", "running")
FINISHED = "finished"
DIED = "died"  # the launcher was killed
EVENTS = "events.jsonl"
RESTART = "restart"  # event: all ranks, or their launcher, restart after a failure
RESUMED = "resumed"  # event: a run was launched again, from a checkpoint
HANG, HANG_OVER = "hang", "hang-over"
TAKEOVER = "takeover"  # event: a spare replaced a host
SPARE_READY = "spare-ready"
SPARE_REFUSED = "spare-refused"  # event: a host is not used as a spare, and why
# Shared disks may show a file's time a minute late.
SILENT_AFTER_S = 120.0
_TOUCH_EVERY_S = 30.0
# A run that fails a thousand times must not fill the disk; its first failures matter most.
_LARGEST_FILE_BYTES = 16 * 2**20
_LONGEST_LINE_BYTES = 4 * 2**20
# How long the launcher of a new, empty run folder may take to write the job.
_WRITTEN_WITHIN_S = 5.0

T = TypeVar("T")
UnixTime = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # up to some thousand years on
_Pid = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """The process that launched a run; its start distinguishes it from a later one with the same PID.

    On Linux the start counts from boot, so that setting the clock does not change it.
    """

    host: str
    pid: _Pid
    start_s: UnixTime

    @classmethod
    def this(cls) -> "Launcher":
        """Return this process."""
        return cls(host=socket.gethostname(), pid=os.getpid(), start_s=_start_s(os.getpid()))

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process would be on this host."""
        return self.host == socket.gethostname()

    def process(self) -> psutil.Process | None:
        """Return the process if it is alive on this host."""
        if not self.is_of_this_machine:
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = _start_s(self.pid) == self.start_s
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


class RunJob(msgspec.Struct, frozen=True, kw_only=True):
    """What was launched."""

    command: list[str]
    folder: str
    hosts: list[str]
    launcher: Launcher
    token: str
    grace_s: float
    slurm_job: str | None = None
    typed: list[str]
    flags: list[str]
    module: bool
    resume_with: list[str]

    @property
    def shown(self) -> list[str]:
        """The command to display: the user's script, or the typed command if the script is ours."""
        return self.typed if is_ours(self.command) else self.command


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run: a phase while it is active; finished, saved, failed, stopped or died after."""

    phase: str
    since_unix_s: UnixTime
    started_unix_s: UnixTime
    exit_code: int | None = None
    headline: str = ""
    resume: str = ""  # how to resume a script that did not finish: a command or a line of Python
    killed_ranks: tuple[int, ...] = ()  # that had not stopped when the grace period was over
    job_uid: str = ""  # of the scheduler's job, if it starts the same command on every host

    @property
    def active(self) -> bool:
        """Whether it is not over, according to the file."""
        return self.phase in ACTIVE


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of a run: a phase started, ranks started, a hang reported, the end."""

    at_unix_s: float
    name: str
    facts: dict[str, Any]


@dataclass(kw_only=True)
class EventSummary:
    """What the events of a run add up to, the same for every view: restarts, resumes, and a hang that is not over."""

    restarts: int = 0
    resumed_from: int | None = None  # the step of the last resume or restart, if it is known
    hang: RunEvent | None = None

    @classmethod
    def of(cls, events: Iterable[RunEvent]) -> "EventSummary":
        """Summarize all events of a run."""
        summary = cls()
        for event in events:
            summary.add(event)
        return summary

    def add(self, event: RunEvent) -> None:
        """Take in the next event."""
        if event.name == HANG:
            self.hang = event
        elif event.name in (HANG_OVER, RESTART, RESUMED, *ACTIVE):
            self.hang = None
        if event.name == RESTART:
            self.restarts += 1
        if event.name in (RESTART, RESUMED):
            step = event.facts.get("from_step")
            self.resumed_from = step if isinstance(step, int) else None


def append_line(path: Path, content: Mapping[str, object]) -> None:
    """Append a line in one write, as several processes may append; a full disk must not stop the run."""
    data = json.dumps(content, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
    if len(data) > _LONGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError), path.open("a+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size <= _LARGEST_FILE_BYTES:
            stream.write(_line_end_if_torn(stream, size) + data + b"\n")


def read_as(content: object, kind: type[T]) -> T | None:
    """Return stored content as a record; None if it is not one. Fields of newer versions are ignored."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return None


def write_job(
    run: RunFolder, spec: JobSpec, *, token: str = "", slurm_job: str | None = None
) -> None:
    """Record what is being launched, with secrets redacted."""
    job = RunJob(
        command=redact_command(spec.command),
        folder=spec.folder,
        hosts=[str(host) for host in spec.hosts],
        launcher=Launcher.this(),
        token=token,
        grace_s=spec.limits.grace_s,
        slurm_job=slurm_job,
        typed=redact_command(spec.typed),
        flags=redact_command(spec.flags),
        module=spec.module,
        resume_with=redact_command(spec.resume_with),
    )
    content = redact_mapping({"spec": asdict(spec)}) | msgspec.to_builtins(job)
    try:
        write_atomically(run.job, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise Impossible(
            f"cannot write to the run folder {run.path}",
            why=error.strerror or str(error),
            fix="free space on that disk, or use another folder for runs: --runs DIR",
        ) from error


def read_job(run: RunFolder) -> RunJob | None:
    """Return what was launched, or None if it has not been recorded (yet)."""
    return read_as(untrusted.read_json_object(run.job), RunJob)


def await_job(run: RunFolder) -> RunJob | None:
    """Return what was launched; for a run that was just created, wait until it is recorded."""
    try:
        created_unix_s = run.marker.stat().st_mtime
    except OSError:
        return read_job(run)
    while (job := read_job(run)) is None and 0 <= time.time() - created_unix_s < _WRITTEN_WITHIN_S:
        time.sleep(0.05)
    return job


def log_event(run: RunFolder, event: str, **facts: object) -> None:
    """Append an event to the event log of a run; it happened now, unless the facts have another ``at_unix_s``."""
    content = {"at_unix_s": time.time(), "event": event} | redact_mapping(facts)
    append_line(run.path / EVENTS, content)


def read_events(run: RunFolder) -> list[RunEvent]:
    """Return the events of a run in order; unreadable lines are skipped."""
    events = map(event_of, untrusted.read_json_lines(run.path / EVENTS))
    return [event for event in events if event is not None]


def event_of(line: dict[str, Any]) -> RunEvent | None:
    """Return the event stored in a line; None if it is not one."""
    at_unix_s = read_as(line.get("at_unix_s"), UnixTime)
    if at_unix_s is None or "event" not in line:
        return None
    facts = {key: value for key, value in line.items() if key not in ("at_unix_s", "event")}
    return RunEvent(at_unix_s=at_unix_s, name=str(line["event"]), facts=facts)


class EventLog:
    """Writes a run's state as it changes."""

    def __init__(self, run: RunFolder, *, job_uid: str = "") -> None:
        self._run = run
        self._job_uid = job_uid
        self._is_finished = False
        self.resume = ""
        self._started_unix_s = time.time()
        before = read_state(run)
        if before is None:
            return
        # A run whose launcher was killed and restarted keeps its start time.
        if before.active or before.phase == DIED:
            self._started_unix_s = before.started_unix_s
        if before.phase == DIED:
            log_event(run, DIED, at_unix_s=before.since_unix_s, what=f"died: {before.headline}")

    def phase(self, name: str) -> None:
        """Record that the run entered another phase."""
        if name == FINISHED:
            self.ended(FINISHED, 0, FINISHED)
            return
        log_event(self._run, name)
        self._write(name)

    def ended(
        self, phase: str, exit_code: int, headline: str, *, killed_ranks: Sequence[int] = ()
    ) -> None:
        """Record that the run is over; ``resume`` is set before if it can be resumed."""
        if self._is_finished:
            return
        self._is_finished = phase == FINISHED
        headline = redact_text(headline)
        log_event(self._run, phase, exit_code=exit_code, headline=headline)
        self._write(
            phase,
            exit_code=exit_code,
            headline=headline,
            resume=self.resume if exit_code else "",
            killed_ranks=tuple(killed_ranks),
        )

    def _write(self, phase: str, **facts: Any) -> None:
        state = RunState(
            phase=phase,
            since_unix_s=time.time(),
            started_unix_s=self._started_unix_s,
            job_uid=self._job_uid,
            **facts,
        )
        text = json.dumps(msgspec.to_builtins(state)) + "\n"
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            write_atomically(self._run.state, text, durable=False)


def read_state(run: RunFolder) -> RunState | None:
    """Return the state of a run; it is ``died`` if the launcher was killed or its heartbeats stopped."""
    content = untrusted.read_json_object(run.state)
    state = read_as(content, RunState)
    if state is None:
        return None
    job = read_job(run)
    if not state.active or job is None or job.launcher.process() is not None:
        return state
    if job.launcher.is_of_this_machine:
        died_unix_s, headline = _last_sign_of_life(run, state), "the launcher was killed"
    else:
        silent_s = silent_for_s(run.state)
        if silent_s < SILENT_AFTER_S:
            return state
        died_unix_s = time.time() - silent_s
        headline = f"no heartbeat from the launcher for {format_seconds(silent_s)}"
    latest = untrusted.read_json_object(run.state)  # it may have ended between the two reads
    if latest != content:
        return read_as(latest, RunState)
    return RunState(
        phase=DIED,
        since_unix_s=died_unix_s,
        started_unix_s=state.started_unix_s,
        headline=headline,
        job_uid=state.job_uid,
    )


@contextlib.contextmanager
def launcher_heartbeat_file(state: Path) -> Iterator[None]:
    """Show other hosts that the launcher is alive, for the duration of the context."""
    task = asyncio.get_running_loop().create_task(_touch_often(state))
    try:
        yield
    finally:
        task.cancel()


def silent_for_s(state: Path) -> float:
    """Return the seconds since a launcher's last heartbeat, by the disk's clock if in doubt."""
    try:
        heard_unix_s = state.stat().st_mtime
    except OSError:
        return 0.0
    silent_s = time.time() - heard_unix_s
    if not 0 <= silent_s < SILENT_AFTER_S:
        # If this host cannot write to the disk, only its own clock is left.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=state.parent) as probe:
            silent_s = os.fstat(probe.fileno()).st_mtime - heard_unix_s
    return max(0.0, silent_s)


async def _touch_often(path: Path) -> None:
    while True:
        await asyncio.sleep(_TOUCH_EVERY_S)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, path)  # a shared disk may take its time


def _last_sign_of_life(run: RunFolder, state: RunState) -> float:
    """Return when a run whose launcher is gone last wrote anything."""
    newest_unix_s = state.since_unix_s
    for path in (run.state, run.path / EVENTS, run.console, *run.logs.glob("rank-*.log")):
        with contextlib.suppress(OSError):
            newest_unix_s = max(newest_unix_s, path.stat().st_mtime)
    return newest_unix_s


def _line_end_if_torn(stream: io.FileIO, size: int) -> bytes:
    """Return a line break if a crash truncated the last line."""
    if not size:
        return b""
    stream.seek(size - 1)
    return b"" if stream.read(1) == b"\n" else b"\n"


def _start_s(pid: int) -> float:
    """Return when a process started: since boot on Linux, elsewhere in Unix time."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return psutil.Process(pid).create_time()
