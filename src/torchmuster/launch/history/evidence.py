"""Failed attempts and hangs of a run: events with their finding, and the dumps of the ranks that hang.

::

    hang/<n>/    the stacks and flight recorders of the ranks in one hang; the event names the folder
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs import flight_recorder
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder

if TYPE_CHECKING:
    from torchmuster.launch.history.root_cause import NodeExit

STACKS, FLIGHT = ".stacks.txt", ".flight.json"
_RANKS_KEPT = 2_000
# A recurring hang is reported each time, but only of the first ones the dumps are kept.
_HANGS_KEPT = 20
_MOST_DUMP_BYTES = 32 * 2**20


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt: its root cause, and the ranks that failed, in chronological order; their logs have the rest."""

    attempt: int
    finding: Finding
    ranks: tuple[int, ...] = ()


class HangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A reported hang, and the folder with the dumps of its ranks, if there is one."""

    finding: Finding
    folder: Path | None = None

    @property
    def files(self) -> list[Path]:
        """The stacks and dumps that were kept, by rank."""
        if self.folder is None:
            return []
        files = []
        for path in self.folder.glob("rank-*"):
            rank = _rank_of(path)
            if rank is not None and path.name.endswith((STACKS, FLIGHT)):
                files.append((rank, path))
        return [path for _, path in sorted(files)]

    def analyse(self) -> list[Finding]:
        """Return what the flight recorders of the ranks show together."""
        dumps = {}
        for path in self.files:
            rank = _rank_of(path)
            dump = _read_dump(path)
            if rank is not None and dump:
                dumps[rank] = dump
        return flight_recorder.analyse_flight_records(dumps)


def log_failure(
    run: RunFolder, attempt: int, finding: Finding, ends: Sequence["NodeExit"] = ()
) -> None:
    """Log why an attempt failed and which of its ranks did; none if it never started."""
    failures = []
    for end in ends:
        for failure in end.ended.failures if end.ended else ():
            failures.append((end.ended_s - failure.ago_s, failure.rank))
    ranks = [rank for _, rank in sorted(failures)[:_RANKS_KEPT]]
    run_state.log_event(
        run, run_state.ATTEMPT_FAILED, attempt=attempt, finding=finding.as_json(), ranks=ranks
    )


def read_failures(run: RunFolder) -> list[FailedAttempt]:
    """Return the failed attempts, oldest first."""
    failures = []
    for event in run_state.read_events(run):
        if event.name == run_state.ATTEMPT_FAILED:
            failures.append(run_state.read_as(event.facts, FailedAttempt))
    return [failure for failure in failures if failure is not None]


def new_hang(run: RunFolder) -> Path | None:
    """Create the folder for the dumps of the next hang; None if there are enough."""
    folders = [int(path.name) for path in run.hang.glob("*") if path.name.isdecimal()]
    if len(folders) >= _HANGS_KEPT:
        return None
    folder = run.hang / str(max(folders, default=0) + 1)
    folder.mkdir()
    return folder


def log_hang(run: RunFolder, finding: Finding, folder: Path | None) -> None:
    """Log a hang as it is reported, with the folder for its dumps."""
    name = folder.name if folder is not None else ""
    run_state.log_event(
        run, run_state.HANG, what=finding.what, finding=finding.as_json(), folder=name
    )


def read_hangs(run: RunFolder) -> list[HangRecord]:
    """Return the reported hangs, oldest first."""
    events = run_state.read_events(run)
    return [hang_of(run, event) for event in events if event.name == run_state.HANG]


def hang_of(run: RunFolder, event: run_state.RunEvent) -> HangRecord:
    """Return the hang that an event reports."""
    finding = event.fact("finding", Finding)
    if finding is None:
        finding = Finding(name=run_state.HANG, status=Status.WARNING, what=event.text)
    name = event.fact("folder", str) or ""
    return HangRecord(finding=finding, folder=run.hang / name if name.isdecimal() else None)


def _read_dump(path: Path) -> dict[str, Any] | None:
    if not path.name.endswith(FLIGHT):
        return None
    with contextlib.suppress(OSError, untrusted.Unreadable):
        return flight_recorder.read_flight_record(untrusted.read_bounded(path, _MOST_DUMP_BYTES))
    return None


def _rank_of(path: Path) -> int | None:
    number = path.name.partition(".")[0].removeprefix("rank-")
    return int(number) if number.isdecimal() else None
