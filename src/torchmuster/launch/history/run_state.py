"""What is known of a run: ``job.json`` says what was launched and by which process, ``events.jsonl`` what happened.

``muster runs``, ``logs``, ``stop``, ``watch`` and ``explain`` know a run only from these files, so they must be right even
if the launcher was killed: whether it is alive comes from the system or its heartbeats, not from the events. The state of
a run is computed from its events in :class:`RunState`, the same for all of them.
"""

import asyncio
import contextlib
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
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.redaction import printable, redact_command, redact_mapping
from torchmuster.runfolder import RunFolder, write_atomically
from torchmuster.units import format_seconds

# The phases of a run that is not over, and those of one that is; each is an event.
ACTIVE = ("submitted", "waiting", "joining", "starting", "running")
FINISHED = "finished"
DIED = "died"  # the launcher was killed
ENDS = (FINISHED, "failed", "stopped", "saved", DIED)
# More events:
LAUNCHED = "launched"  # a launcher began, unless it continues the work of one that was killed
ATTEMPT_FAILED = "attempt-failed"  # with the finding, and the ranks that failed
RESTART = "restart"  # all ranks, or their launcher, restart after a failure
RESUMED = "resumed"  # a run was launched again, from a checkpoint
RANKS_KILLED = "ranks-killed"  # they had not stopped when the grace period was over
HANG, HANG_OVER = "hang", "hang-over"
TAKEOVER = "takeover"  # a spare replaced a host
SPARE_READY = "spare-ready"
SPARE_REFUSED = "spare-refused"  # a host is not used as a spare, and why
# Shared disks may show a file's time a minute late.
SILENT_AFTER_S = 120.0
_TOUCH_EVERY_S = 30.0
# A run that fails a thousand times must not fill the disk; its first failures matter most.
_LARGEST_FILE_BYTES = 16 * 2**20
_LONGEST_LINE_BYTES = 4 * 2**20
_LONGEST_TEXT = 200
# Short events that decide what the state of a run is; they are written beyond the limit, too.
_OF_STATE = frozenset({*ACTIVE, *ENDS, LAUNCHED, RESTART, RESUMED, HANG_OVER})

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
    job_uid: str = ""  # of the scheduler's job, if it starts the same command on every host
    typed: list[str]
    flags: list[str]
    module: bool
    resume_with: list[str]

    @property
    def shown(self) -> list[str]:
        """The command to display: the user's script, or the typed command if the script is ours."""
        return self.typed if is_ours(self.command) else self.command


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of a run: a phase started, ranks started, a hang reported, the end."""

    at_unix_s: float
    name: str
    facts: dict[str, Any]

    @property
    def text(self) -> str:
        """What happened in one line; "" for an event that only programs read."""
        line = str(self.facts.get("what", "")).partition("\n")[0]
        return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}…"

    def fact(self, name: str, kind: type[T]) -> T | None:
        """Return a fact of this type; None if there is none: anyone may have written the file."""
        return read_as(self.facts.get(name), kind)


@dataclass(kw_only=True)
class RunState:
    """What the events of a run add up to.

    The phase is one of ``ACTIVE`` or ``ENDS``. ``finding`` is the cause if the run failed, ``hang`` the hang that is not over,
    ``resumed_from`` the step of the last resume or restart, if it is known. ``launches`` counts the launchers, without those
    that continued the work of a killed one.
    """

    phase: str = ""
    since_unix_s: float = 0.0
    started_unix_s: float = 0.0
    launches: int = 0
    exit_code: int | None = None
    headline: str = ""
    finding: Finding | None = None
    killed_ranks: tuple[int, ...] = ()  # that had not stopped when the grace period was over
    restarts: int = 0
    resumed_from: int | None = None
    hang: RunEvent | None = None

    @classmethod
    def of(cls, events: Iterable[RunEvent]) -> "RunState | None":
        """Add up all events of a run; None if it has entered no phase yet."""
        state = cls()
        for event in events:
            state.add(event)
        return state if state.phase else None

    @property
    def active(self) -> bool:
        """Whether it is not over, according to the events."""
        return self.phase in ACTIVE

    def add(self, event: RunEvent) -> None:
        """Take in the next event."""
        if event.name == LAUNCHED:
            self.launches += 1
            self.started_unix_s = event.at_unix_s
        elif event.name == HANG:
            self.hang = event
        elif event.name == HANG_OVER:
            self.hang = None
        elif event.name in (RESTART, RESUMED):
            self.hang = None
            self.restarts += event.name == RESTART
            self.resumed_from = event.fact("from_step", int)
        elif event.name in ACTIVE or event.name in ENDS:
            self._enter(event)

    def _enter(self, event: RunEvent) -> None:
        self.phase = event.name
        self.since_unix_s = event.at_unix_s
        self.started_unix_s = self.started_unix_s or event.at_unix_s
        self.exit_code = event.fact("exit_code", int)
        self.headline = event.fact("headline", str) or ""
        self.finding = event.fact("finding", Finding)
        self.killed_ranks = event.fact("killed_ranks", tuple[int, ...]) or ()
        if self.active:
            self.hang = None


def append_line(path: Path, content: Mapping[str, object], *, always: bool = False) -> None:
    """Append a line in one write, as several processes may append; a full disk must not stop the run.

    A file beyond the limit gets only lines that are ``always`` written.
    """
    data = json.dumps(content, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
    if len(data) > _LONGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as stream:
        if always or stream.tell() <= _LARGEST_FILE_BYTES:
            stream.write(b"\n" + data + b"\n")  # a crash may have truncated the line before


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
        job_uid=spec.job_uid,
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


def log_event(run: RunFolder, event: str, **facts: object) -> None:
    """Append an event to the event log of a run; it happened now, unless the facts have another ``at_unix_s``."""
    content = {"at_unix_s": time.time(), "event": event} | redact_mapping(facts)
    append_line(run.events, content, always=event in _OF_STATE)


def read_events(run: RunFolder) -> list[RunEvent]:
    """Return the events of a run in order; unreadable lines are skipped."""
    events = map(event_of, untrusted.read_json_lines(run.events))
    return [event for event in events if event is not None]


def event_of(line: dict[str, Any]) -> RunEvent | None:
    """Return the event stored in a line; None if it is not one."""
    at_unix_s = read_as(line.get("at_unix_s"), UnixTime)
    if at_unix_s is None or "event" not in line:
        return None
    facts = {key: value for key, value in line.items() if key not in ("at_unix_s", "event")}
    return RunEvent(at_unix_s=at_unix_s, name=str(line["event"]), facts=facts)


class EventLog:
    """Logs the phases of a run."""

    def __init__(self, run: RunFolder, *, command: Sequence[str] = ()) -> None:
        """Log that a launcher begins; it continues the run of one that was killed, whose end nobody has logged."""
        self._run = run
        self._is_finished = False
        before = read_state(run)
        if before is None or not (before.active or before.phase == DIED):
            log_event(run, LAUNCHED, what=f"launched: {printable(command)}")
        elif before.phase == DIED:
            what = f"died: {before.headline}"
            log_event(run, DIED, at_unix_s=before.since_unix_s, what=what)

    def phase(self, name: str) -> None:
        """Record that the run entered another phase."""
        if name == FINISHED:
            self.ended(FINISHED, 0, FINISHED)
        else:
            log_event(self._run, name)

    def ended(
        self,
        phase: str,
        exit_code: int,
        headline: str,
        *,
        finding: Finding | None = None,
        killed_ranks: Sequence[int] = (),
    ) -> None:
        """Record that the run is over; ``finding`` is why it failed."""
        if self._is_finished:
            return
        self._is_finished = phase == FINISHED
        what = headline if headline.startswith(phase) else f"{phase}: {headline}"
        facts: dict[str, object] = {"what": what, "headline": headline, "exit_code": exit_code}
        if finding is not None:
            facts["finding"] = finding.as_json()
        if killed_ranks:
            facts["killed_ranks"] = list(killed_ranks)
        log_event(self._run, phase, **facts)


def read_state(run: RunFolder) -> RunState | None:
    """Return the state of a run; it is ``died`` if the launcher was killed or its heartbeats stopped."""
    return state_of(run, read_job(run))


def state_of(run: RunFolder, job: RunJob | None) -> RunState | None:
    """Return the state of a run whose job was read."""
    # Before the events are read: what a launcher logs last is then among them.
    is_alive = job is None or job.launcher.process() is not None
    state = RunState.of(read_events(run))
    if state is None or job is None or is_alive or not state.active:
        return state
    if job.launcher.is_of_this_machine:
        state.since_unix_s = _last_sign_of_life(run, state)
        state.headline = "the launcher was killed"
    else:
        silent_s = silent_for_s(run.job)
        if silent_s < SILENT_AFTER_S:
            return state
        state.since_unix_s = time.time() - silent_s
        state.headline = f"no heartbeat from the launcher for {format_seconds(silent_s)}"
    state.phase = DIED
    return state


@contextlib.contextmanager
def launcher_heartbeat(job: Path) -> Iterator[None]:
    """Show other hosts that the launcher is alive, for the duration of the context: by the time of ``job.json``."""
    task = asyncio.get_running_loop().create_task(_touch_often(job))
    try:
        yield
    finally:
        task.cancel()


def silent_for_s(job: Path) -> float:
    """Return the seconds since a launcher's last heartbeat, by the disk's clock if in doubt."""
    try:
        heard_unix_s = job.stat().st_mtime
    except OSError:
        return 0.0
    silent_s = time.time() - heard_unix_s
    if not 0 <= silent_s < SILENT_AFTER_S:
        # If this host cannot write to the disk, only its own clock is left.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=job.parent) as probe:
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
    for path in (run.job, run.events, run.console, *run.logs.glob("rank-*.log")):
        with contextlib.suppress(OSError):
            newest_unix_s = max(newest_unix_s, path.stat().st_mtime)
    return newest_unix_s


def _start_s(pid: int) -> float:
    """Return when a process started: since boot on Linux, elsewhere in Unix time."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return psutil.Process(pid).create_time()
