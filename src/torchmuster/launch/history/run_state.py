"""Run state in the run folder: what was launched, by which process, and its phase.

``muster runs``, ``logs`` and ``stop`` know a run only from these files, so they must be right even if the
launcher was killed: whether it is alive comes from the system or its heartbeats, not from the file.
"""

import asyncio
import contextlib
import io
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.redaction import redact_command, redact_mapping, redact_text
from torchmuster.runfolder import RunFolder, write_atomically
from torchmuster.units import format_seconds

# A run that fails a thousand times must not fill the disk; its first failures matter most.
_LARGEST_FILE_BYTES = 16 * 2**20
_LONGEST_LINE_BYTES = 4 * 2**20
_MOST_PID = 2**31
_LAST_UNIX_S = 1e11  # some thousand years on


def append_line(path: Path, content: Mapping[str, object]) -> None:
    """Append a line in one write, as several processes may append; a full disk must not stop the run."""
    data = json.dumps(content, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
    if len(data) > _LONGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError), path.open("a+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size <= _LARGEST_FILE_BYTES:
            stream.write(_line_end_if_torn(stream, size) + data + b"\n")


def _line_end_if_torn(stream: io.FileIO, size: int) -> bytes:
    """Return a line break if a crash truncated the last line."""
    if not size:
        return b""
    stream.seek(size - 1)
    return b"" if stream.read(1) == b"\n" else b"\n"


def unix_s(value: object) -> float:
    """Return a stored time; raises ValueError if it is not a valid Unix time."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a time: {value!r}")
    if not 0 <= value < _LAST_UNIX_S:  # nor is NaN
        raise ValueError(f"not a time: {value!r}")
    return float(value)


# Shared disks may show a file's time a minute late.
_EVERY_S = 30.0
SILENT_AFTER_S = 120.0


@contextlib.contextmanager
def launcher_heartbeat_file(state: Path) -> Iterator[None]:
    """Show other hosts that the launcher is alive, for the duration of the context."""
    task = asyncio.get_running_loop().create_task(_touch_often(state))
    try:
        yield
    finally:
        task.cancel()


async def _touch_often(path: Path) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, path)  # a shared disk may take its time


def silent_for_s(state: Path) -> float:
    """Return the seconds since a launcher's last heartbeat, by the disk's clock if in doubt."""
    try:
        heard = state.stat().st_mtime
    except OSError:
        return 0.0
    silent_s = time.time() - heard
    if not 0 <= silent_s < SILENT_AFTER_S:
        # If this host cannot write to the disk, only its own clock is left.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=state.parent) as written_now:
            silent_s = os.fstat(written_now.fileno()).st_mtime - heard
    return max(0.0, silent_s)


# The phases of a run that is not over.
ACTIVE = ("submitted", "waiting", "joining", "starting", "running")
EVENTS = "events.jsonl"
FINISHED = "finished"
RESTART = "restart"  # event: all ranks, or their launcher, restart after a failure
TAKEOVER = "takeover"  # event: a spare replaced a host, or none could
SPARE_READY, SPARE_LOST = "spare-ready", "spare-lost"
SPARE_REFUSED = "spare-refused"  # event: a host is not used as a spare, and why
# How long the launcher of a new, empty run folder may take to write the job.
_WRITTEN_WITHIN_S = 5.0
_CLOCK_TOLERANCE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The process that launched a run; its start time distinguishes it from a later one with the same PID.

    ``start_ticks`` (Linux) count from boot, so that setting the clock does not change the identity.
    """

    host: str
    pid: int
    created_unix_s: float
    start_ticks: int | None = None

    @classmethod
    def this(cls) -> "Launcher":
        """Return this process."""
        process = psutil.Process()
        return cls(
            host=socket.gethostname(),
            pid=process.pid,
            created_unix_s=process.create_time(),
            start_ticks=_start_ticks(process.pid),
        )

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
            if self.start_ticks is not None:
                same = _start_ticks(self.pid) == self.start_ticks
            else:
                same = abs(process.create_time() - self.created_unix_s) < _CLOCK_TOLERANCE_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What was launched."""

    command: list[str]
    folder: str
    hosts: list[str] = field(default_factory=list)
    launcher: Launcher
    token: str = ""
    grace_s: float = 30.0
    slurm_job: str | None = None
    typed: list[str] = field(default_factory=lambda: ["run"])
    flags: list[str] = field(default_factory=list)
    module: bool = False
    resume_with: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        """The command to display: the user's script, or the typed command if the script is ours."""
        return self.typed if is_ours(self.command) else self.command


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run: a phase while it is active; finished, failed or stopped after."""

    phase: str
    since_unix_s: float
    started_unix_s: float
    exit_code: int | None = None
    headline: str = ""
    resume: str = ""  # how to resume a script that did not finish: a command or a line of Python
    killed_ranks: tuple[int, ...] = ()  # that had not stopped when the grace period was over
    job_uid: str = ""  # of the scheduler's job, if it starts the same command on every host

    @property
    def active(self) -> bool:
        """Whether it is not over, according to the file."""
        return self.phase in ACTIVE


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
    content = redact_mapping({"spec": asdict(spec)}) | asdict(job)
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
    content = untrusted.read_json_object(run.job)
    try:
        return RunJob(
            command=_texts(content["command"]),
            folder=str(content["folder"]),
            hosts=_texts(content["hosts"]),
            launcher=_launcher(content["launcher"]),
            token=str(content["token"]),
            grace_s=_grace_s(content["grace_s"]),
            slurm_job=None if content["slurm_job"] is None else str(content["slurm_job"]),
            typed=_texts(content["typed"]),
            flags=_texts(content["flags"]),
            module=bool(content["module"]),
            resume_with=_texts(content["resume_with"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _texts(content: object) -> list[str]:
    if not isinstance(content, list) or not all(isinstance(one, str) for one in content):
        raise TypeError("not a list of texts")
    return content


def _launcher(content: Mapping[str, Any]) -> Launcher:
    """Return a stored launcher process; fields that a newer version may have added are ignored."""
    pid, ticks = content["pid"], content.get("start_ticks")
    if not isinstance(pid, int) or not 0 < pid < _MOST_PID or not isinstance(ticks, int | None):
        raise ValueError("not a process")
    return Launcher(
        host=str(content["host"]),
        pid=pid,
        created_unix_s=unix_s(content["created_unix_s"]),
        start_ticks=ticks,
    )


def _grace_s(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < _LAST_UNIX_S
    ):
        raise ValueError(f"not a duration: {value!r}")
    return float(value)


def await_job(run: RunFolder) -> RunJob | None:
    """Return what was launched; for a run that was just created, wait until it is recorded."""
    try:
        made = run.marker.stat().st_mtime
    except OSError:
        return read_job(run)
    while (job := read_job(run)) is None and 0 <= time.time() - made < _WRITTEN_WITHIN_S:
        time.sleep(0.05)
    return job


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of a run: a phase started, ranks started, a hang reported, the end."""

    at_unix_s: float
    name: str
    facts: dict[str, Any]


def log_event(run: RunFolder, event: str, **facts: object) -> None:
    """Append an event to the event log of a run."""
    content = redact_mapping(facts) | {"at_unix_s": time.time(), "event": event}
    append_line(run.path / EVENTS, content)


def read_events(run: RunFolder) -> list[RunEvent]:
    """Return the events of a run in order; unreadable lines are skipped."""
    return [
        event for line in untrusted.read_json_lines(run.path / EVENTS) if (event := event_of(line))
    ]


def event_of(line: dict[str, Any]) -> RunEvent | None:
    """Return the event stored in a line; None if it is not one."""
    try:
        at_unix_s, name = unix_s(line["at_unix_s"]), str(line["event"])
    except (KeyError, TypeError, ValueError):
        return None
    facts = {key: value for key, value in line.items() if key not in ("at_unix_s", "event")}
    return RunEvent(at_unix_s=at_unix_s, name=name, facts=facts)


class EventLog:
    """Writes a run's state as it changes."""

    def __init__(self, run: RunFolder, *, job_uid: str = "") -> None:
        self._run = run
        self._job_uid = job_uid
        self._is_finished = False
        self.resume = ""
        before = _history_state(untrusted.read_json_object(run.state))
        # A run whose launcher was killed and restarted keeps its start time.
        goes_on = before is not None and before.active
        self._started = before.started_unix_s if before and goes_on else time.time()

    def phase(self, name: str) -> None:
        """Record that the run entered another phase."""
        if name == FINISHED:
            self.ended(FINISHED, 0, FINISHED)
            return
        log_event(self._run, name)
        self._write(
            RunState(
                phase=name,
                since_unix_s=time.time(),
                started_unix_s=self._started,
                job_uid=self._job_uid,
            )
        )

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
            RunState(
                phase=phase,
                since_unix_s=time.time(),
                started_unix_s=self._started,
                exit_code=exit_code,
                headline=headline,
                resume=self.resume if exit_code else "",
                killed_ranks=tuple(killed_ranks),
                job_uid=self._job_uid,
            )
        )

    def _write(self, state: RunState) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            write_atomically(self._run.state, json.dumps(asdict(state)) + "\n", durable=False)


def read_state(run: RunFolder) -> RunState | None:
    """Return the state of a run; it is ``died`` if the launcher was killed or its heartbeats stopped."""
    content = untrusted.read_json_object(run.state)
    state = _history_state(content)
    if state is None:
        return None
    job = read_job(run)
    if not state.active or job is None or job.launcher.process() is not None:
        return state
    since_unix_s, headline = _heard_unix_s(run, state), "the launcher was killed"
    if not job.launcher.is_of_this_machine:
        silent_s = silent_for_s(run.state)
        if silent_s < SILENT_AFTER_S:
            return state
        since_unix_s = time.time() - silent_s
        headline = f"no heartbeat from the launcher for {format_seconds(silent_s)}"
    fresh = untrusted.read_json_object(run.state)  # it may have ended between the two reads
    if fresh != content:
        return _history_state(fresh)
    return RunState(
        phase="died",
        since_unix_s=since_unix_s,
        started_unix_s=state.started_unix_s,
        headline=headline,
    )


def _heard_unix_s(run: RunFolder, state: RunState) -> float:
    """Return the time of the last heartbeat of a launcher that is gone."""
    try:
        return max(state.since_unix_s, run.state.stat().st_mtime)
    except OSError:
        return state.since_unix_s


def _history_state(content: dict[str, Any]) -> RunState | None:
    """Return the state stored in this content; None if it is not one."""
    exit_code, killed = content.get("exit_code"), content.get("killed_ranks")
    try:
        return RunState(
            phase=str(content["phase"]),
            since_unix_s=unix_s(content["since_unix_s"]),
            started_unix_s=unix_s(content["started_unix_s"]),
            exit_code=exit_code if isinstance(exit_code, int) else None,
            headline=str(content.get("headline", "")),
            resume=str(content.get("resume", "")),
            job_uid=str(content.get("job_uid", "")),
            killed_ranks=tuple(rank for rank in killed if isinstance(rank, int))
            if isinstance(killed, list)
            else (),
        )
    except (KeyError, ValueError):
        return None
