"""Records of failures and hangs in the run folder, so that they can be explained later and on other hosts.

::

    failures.jsonl         a line for each failed attempt: the root cause, and how every rank exited
    hang/<n>/hang.json     a hang as it was reported; next to it each rank's stacks and flight recorder

If the last line is truncated, only that line is lost. Secrets are redacted, sizes are limited, and write
errors do not stop the run.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmuster import untrusted
from torchmuster.finding import Finding
from torchmuster.launch.hangs import flight_recorder
from torchmuster.launch.history.root_cause import NodeExit
from torchmuster.launch.history.run_state import UnixTime, append_line, read_as
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder, write_atomically

FAILURES = "failures.jsonl"
HANG = "hang.json"
STACKS, FLIGHT = ".stacks.txt", ".flight.json"
_RANKS_KEPT = 2_000
_MOST_DUMP_BYTES = 32 * 2**20


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt: its root cause, and the ranks that failed, in chronological order; their logs have the rest."""

    attempt: int
    at_unix_s: UnixTime
    finding: Finding
    ranks: tuple[int, ...] = ()


class HangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A reported hang and the analysis of its dumps."""

    at_unix_s: UnixTime
    finding: Finding
    analysis: tuple[Finding, ...]
    path: str = ""

    @property
    def folder(self) -> Path:
        """The folder with the stacks and dumps."""
        return Path(self.path)

    @property
    def files(self) -> list[Path]:
        """The stacks and dumps that were kept, by rank."""
        ranks = {}
        for ending in (STACKS, FLIGHT):
            for path in self.folder.glob(f"rank-*{ending}"):
                ranks[path] = _rank_of(path)
        known = [(rank, path) for path, rank in ranks.items() if rank is not None]
        return [path for _, path in sorted(known)]


def keep_failure(
    run: RunFolder, attempt: int, finding: Finding, ends: Sequence[NodeExit] = ()
) -> FailedAttempt:
    """Record why an attempt failed and which of its ranks did; none if it never started."""
    failures = []
    for end in ends:
        for failure in end.ended.failures if end.ended else ():
            failures.append((end.ended_s - failure.ago_s, failure.rank))
    failed = FailedAttempt(
        attempt=attempt,
        at_unix_s=time.time(),
        finding=redacted_finding(finding),
        ranks=tuple(rank for _, rank in sorted(failures)[:_RANKS_KEPT]),
    )
    append_line(run.path / FAILURES, msgspec.to_builtins(failed))
    return failed


def read_failures(run: RunFolder) -> list[FailedAttempt]:
    """Return the failed attempts, oldest first; unreadable lines are skipped."""
    lines = untrusted.read_json_lines(run.path / FAILURES)
    records = [read_as(line, FailedAttempt) for line in lines]
    return [record for record in records if record is not None]


def new_hang(run: RunFolder) -> Path:
    """Create the folder of the next hang, for the ranks' stack dumps."""
    run.hang.mkdir(exist_ok=True)
    number = max((int(path.name) for path in hang_folders(run)), default=0)
    while True:
        number += 1
        folder = run.hang / str(number)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def keep_hang(folder: Path, finding: Finding, *, at_unix_s: float | None = None) -> HangRecord:
    """Record a hang as it was reported, with the combined analysis of the dumps in the folder.

    Called again when more dumps have arrived, or when the same hang is reported again.
    """
    if at_unix_s is None:
        known = read_hang(folder)
        at_unix_s = known.at_unix_s if known else time.time()
    hang = HangRecord(
        at_unix_s=at_unix_s,
        finding=redacted_finding(finding),
        analysis=tuple(flight_recorder.analyse_flight_records(dumps_in(folder))),
        path=str(folder),
    )
    text = json.dumps(msgspec.to_builtins(hang), indent=2, ensure_ascii=False) + "\n"
    with contextlib.suppress(OSError):  # a full disk must not stop the run
        write_atomically(folder / HANG, text, durable=False)
    return hang


def read_hang(folder: Path) -> HangRecord | None:
    """Return the hang recorded in a folder; None if there is none."""
    hang = read_as(untrusted.read_json_object(folder / HANG), HangRecord)
    # The run folder may have been moved or copied.
    return None if hang is None else msgspec.structs.replace(hang, path=str(folder))


def read_hangs(run: RunFolder) -> list[HangRecord]:
    """Return the reported hangs, oldest first."""
    hangs = map(read_hang, hang_folders(run))
    return [hang for hang in hangs if hang is not None]


def hang_folders(run: RunFolder) -> list[Path]:
    """Return the folders of the reported hangs, oldest first."""
    try:
        folders = [path for path in run.hang.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: int(path.name))


def dumps_in(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the flight recorder dumps in a folder, by rank."""
    dumps = {}
    for path in folder.glob("rank-*.json"):
        rank = _rank_of(path)
        with contextlib.suppress(OSError, untrusted.Unreadable):
            data = untrusted.read_bounded(path, _MOST_DUMP_BYTES)
            dump = flight_recorder.read_flight_record(data)
            if rank is not None and dump:
                dumps[rank] = dump
    return dumps


def redacted_finding(finding: Finding) -> Finding:
    """Return a finding without secrets; parts of it are output of other programs."""
    return dataclasses.replace(
        finding,
        what=redact_text(finding.what),
        why=redact_text(finding.why),
        fix=redact_text(finding.fix),
        evidence=redact_text(finding.evidence),
    )


def _rank_of(path: Path) -> int | None:
    number = path.name.partition(".")[0].removeprefix("rank-")
    return int(number) if number.isdecimal() else None
