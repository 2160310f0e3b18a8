"""A job's entry in the queue: what its owner chose, in its run folder; and how to submit it again after a reboot.

``queue.json`` in the run folder is written by the commands of its owner (``muster run --queue``, ``muster queue hold``)
and read by the process that waits for the devices. The list of jobs to submit again is in the user's state folder.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.devices.claims import stored_time
from torchmuster.devices.snapshot import user_state_folder
from torchmuster.devices.tickets import HIGHEST_PRIORITY, QueuedJob
from torchmuster.errors import DependencyFailed, Impossible
from torchmuster.launch.history.run_state import FINISHED, read_state
from torchmuster.redaction import is_secret_name, printable
from torchmuster.runfolder import RunFolder, run_name, write_atomically

QUEUE_FILE = "queue.json"
# A run that was stopped with a checkpoint can still finish: ``muster train --resume``.
_MAY_FINISH = "saved"


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """What the owner of a job chose; the fields are those of :class:`QueuedJob`, ``after`` are run folders."""

    since_unix_s: float
    ready_unix_s: float
    priority: int = 0
    held: bool = False
    after: tuple[str, ...] = ()
    lasts_s: float | None = None


def write_queue_entry(run: RunFolder, entry: QueueEntry) -> None:
    """Store what the owner of a job chose."""
    try:
        write_atomically(run.path / QUEUE_FILE, json.dumps(asdict(entry)) + "\n")
    except OSError as error:
        raise Impossible(
            f"cannot write to the run folder {run.path}", why=error.strerror or str(error)
        ) from error


def read_queue_entry(run: RunFolder) -> QueueEntry | None:
    """Return what the owner of a job chose; None if it is not queued, or the file is of another user."""
    path = run.path / QUEUE_FILE
    try:
        if hasattr(os, "geteuid") and path.lstat().st_uid != os.geteuid():
            return None
        stored = untrusted.read_json_object(path)
        since = stored_time(stored["since_unix_s"])
        if since is None:
            return None
        after = stored["after"]
        return QueueEntry(
            since_unix_s=since,
            ready_unix_s=stored_time(stored["ready_unix_s"]) or since,
            priority=max(-HIGHEST_PRIORITY, min(int(stored["priority"]), HIGHEST_PRIORITY)),
            held=bool(stored["held"]),
            after=tuple(map(str, after)) if isinstance(after, list) else (),
            lasts_s=stored_time(stored["lasts_s"]),
        )
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None


class JobInQueue:
    """The state of a queued job at each call; raises :class:`DependencyFailed` if a run that it waits for failed."""

    def __init__(self, run: RunFolder, entry: QueueEntry) -> None:
        self._run, self._entry = run, entry
        self._name = run_name(run)
        self._waited_unix_s = 0.0  # when it last waited for other runs

    def __call__(self) -> QueuedJob:
        """Return the state now."""
        self._entry = entry = read_queue_entry(self._run) or self._entry
        after = unfinished_runs(entry.after)
        if after:
            self._waited_unix_s = time.time()
        return QueuedJob(
            run=str(self._run.path.resolve()),
            name=self._name,
            since_unix_s=entry.since_unix_s,
            ready_unix_s=max(entry.ready_unix_s, self._waited_unix_s),
            priority=entry.priority,
            held=entry.held,
            after=after,
            lasts_s=entry.lasts_s,
        )


def unfinished_runs(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the runs that have not finished; raise if one of them failed or is gone."""
    left = []
    for folder in folders:
        run = RunFolder(Path(folder))
        if not run.marker.is_file():
            raise DependencyFailed(
                f"cancelled: run {run.id}, which this job waits for, does not exist any more",
                why=f"{run.marker} is missing",
                fix="submit the job again without --after",
            )
        state = read_state(run)
        if state is None or state.active or state.phase == _MAY_FINISH or _is_submitted(run):
            left.append(run.id)
        elif state.phase != FINISHED:
            raise DependencyFailed(
                f"cancelled: run {run.id}, which this job waits for, did not finish ({state.phase})",
                why=printable([state.headline]),
                fix=f"muster explain {run.path}  # then submit both again",
            )
    return tuple(left)


def change_queue_entry(run: RunFolder, **changes: Any) -> None:
    """Change what the owner of a job chose; a released job is ready from now on."""
    entry = read_queue_entry(run)
    if entry is None:
        raise Impossible(f"{run.id} is not queued", fix="muster queue  # lists the queue")
    if entry.held and changes.get("held") is False:
        changes["ready_unix_s"] = time.time()
    write_queue_entry(run, replace(entry, **changes))


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How to submit a queued job again: the arguments after ``muster``, the folder and the environment."""

    run: RunFolder
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]


def remember_submission(
    run: RunFolder, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Store how to submit a queued job again, for its owner only; variables that hold secrets are left out."""
    path = _submission_path(run.id)
    if path is None:
        return
    content = {
        "run": str(run.path.resolve()),
        "arguments": list(arguments),
        "folder": str(Path.cwd()),
        "environment": {k: v for k, v in environment.items() if not is_secret_name(k)},
    }
    with contextlib.suppress(OSError):  # then it is not restored after a reboot
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        private = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(private, "w", encoding="utf-8") as stream:
            json.dump(content, stream)


def forget_submission(run: RunFolder) -> None:
    """Forget how to submit a job: it has started, or its owner cancelled it."""
    if (path := _submission_path(run.id)) is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_submissions() -> list[Submission]:
    """Return this user's jobs that have not left the queue, the oldest first."""
    folder = user_state_folder(os.environ)
    paths = sorted((folder / "queue").glob("*.json")) if folder is not None else []
    found = []
    for path in paths:
        stored = untrusted.read_json_object(path)
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            found.append(
                Submission(
                    run=RunFolder(Path(stored["run"])),
                    arguments=tuple(map(str, stored["arguments"])),
                    folder=str(stored["folder"]),
                    environment={str(k): str(v) for k, v in stored["environment"].items()},
                )
            )
    return sorted(found, key=lambda one: _since(one.run))


def _is_submitted(run: RunFolder) -> bool:
    """Return whether a run of this user was ended in the queue, as by a reboot, and can be submitted again."""
    path = _submission_path(run.id)
    return path is not None and path.is_file()


def _since(run: RunFolder) -> float:
    entry = read_queue_entry(run)
    return 0.0 if entry is None else entry.since_unix_s


def _submission_path(run_id: str) -> Path | None:
    folder = user_state_folder(os.environ)
    return None if folder is None else folder / "queue" / f"{run_id}.json"
