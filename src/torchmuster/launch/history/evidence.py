"""Records of failures and hangs in the run folder, so that they can be explained later and on other hosts.

::

    failures.jsonl         a line for each failed attempt: the root cause, and how every rank exited
    hang/<n>/hang.json     a hang as it was reported; next to it each rank's stacks and flight recorder

If the last line is truncated, only that line is lost. Secrets are redacted, sizes are limited, and write
errors do not stop the run.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.hangs import flight_recorder
from torchmuster.launch.history import root_cause
from torchmuster.launch.history.root_cause import NodeExit
from torchmuster.launch.history.run_state import append_line, unix_s
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder, write_atomically

FAILURES = "failures.jsonl"
HANG = "hang.json"
STACKS, FLIGHT = ".stacks.txt", ".flight.json"
_RANKS_WHOLE = 16
_RANKS_AT_ALL = 2_000
_LINES_OF_LOG = 30
_LONGEST_TEXT = 16_000
_SHORT_TEXT = 300
_NOT_UNDERSTOOD = (KeyError, TypeError, ValueError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank of a failed attempt exited."""

    rank: int
    host: str
    exit_code: int
    at_unix_s: float
    error: str = ""
    traceback: str = ""
    last_lines: str = ""
    peak_rss_bytes: int | None = None
    evidence: str = ""


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """A failed attempt: its root cause, and the ranks that failed, in chronological order."""

    attempt: int
    at_unix_s: float
    finding: Finding
    ranks: tuple[RankEnd, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    """A reported hang and the analysis of its dumps; ``folder`` has the files."""

    at_unix_s: float
    finding: Finding
    analysis: tuple[Finding, ...]
    folder: Path

    @property
    def files(self) -> list[Path]:
        """The stacks and dumps that were kept, by rank."""
        found = (path for end in (STACKS, FLIGHT) for path in self.folder.glob(f"rank-*{end}"))
        kept = [(rank, path) for path in found if (rank := _rank_of(path)) is not None]
        return [path for _, path in sorted(kept)]


# ---- failures


def keep_failure(
    run: RunFolder, attempt: int, finding: Finding, ends: Sequence[NodeExit] = ()
) -> FailedAttempt:
    """Record why an attempt failed and how each of its ranks exited; no ranks if it never started."""
    failed = FailedAttempt(
        attempt=attempt,
        at_unix_s=time.time(),
        finding=redacted_evidence(finding),
        ranks=_evidence_ranks(ends),
    )
    content = asdict(failed) | {"finding": failed.finding.as_json()}
    append_line(run.path / FAILURES, content)
    return failed


def read_failures(run: RunFolder) -> list[FailedAttempt]:
    """Return the failed attempts, oldest first; unreadable lines are skipped."""
    found = []
    for line in untrusted.read_json_lines(run.path / FAILURES):
        with contextlib.suppress(*_NOT_UNDERSTOOD):
            found.append(
                FailedAttempt(
                    attempt=int(line["attempt"]),
                    at_unix_s=unix_s(line["at_unix_s"]),
                    finding=finding_from(line["finding"]),
                    ranks=tuple(_rank_ends(line.get("ranks"))),
                )
            )
    return found


def _rank_ends(content: object) -> Iterator[RankEnd]:
    """Yield how ranks exited; unreadable entries and fields of newer versions are skipped."""
    for one in content if isinstance(content, list) else ():
        with contextlib.suppress(*_NOT_UNDERSTOOD):
            peak = one.get("peak_rss_bytes") if isinstance(one, dict) else None
            texts = ("error", "traceback", "last_lines", "evidence")
            yield RankEnd(
                rank=int(one["rank"]),
                host=str(one["host"]),
                exit_code=int(one["exit_code"]),
                at_unix_s=unix_s(one["at_unix_s"]),
                peak_rss_bytes=peak if isinstance(peak, int) else None,
                **{name: str(one.get(name, "")) for name in texts},
            )


def _evidence_ranks(ends: Sequence[NodeExit]) -> tuple[RankEnd, ...]:
    now_s, now_unix_s = time.monotonic(), time.time()
    found = []
    for end in ends:
        for failure in end.ended.failures if end.ended else ():
            at_s = end.ended_s - failure.ago_s
            at_unix_s = now_unix_s - max(0.0, now_s - at_s)
            found.append((at_unix_s, end.host, failure))
    found.sort(key=lambda one: (one[0], one[2].rank))
    return tuple(
        _rank_end(failure, host, at_unix_s, whole=place < _RANKS_WHOLE)
        for place, (at_unix_s, host, failure) in enumerate(found[:_RANKS_AT_ALL])
    )


def _rank_end(failure: protocol.Failure, host: str, at_unix_s: float, *, whole: bool) -> RankEnd:
    error = failure.what or failure.error
    lines = root_cause.last_output(failure.last_lines, _LINES_OF_LOG) if whole else ""
    return RankEnd(
        rank=failure.rank,
        host=host,
        exit_code=failure.exit_code,
        at_unix_s=at_unix_s,
        error=redact_text(error[:_LONGEST_TEXT] if whole else error[:_SHORT_TEXT]),
        traceback=redact_text(failure.traceback[-_LONGEST_TEXT:]) if whole else "",
        last_lines=redact_text(lines[-_LONGEST_TEXT:]),
        peak_rss_bytes=failure.peak_rss_bytes,
        evidence=redact_text(failure.evidence[:_LONGEST_TEXT]),
    )


# ---- hangs


def new_hang(run: RunFolder) -> Path:
    """Create the folder of the next hang, for the ranks' stack dumps."""
    run.hang.mkdir(exist_ok=True)
    number = max((int(path.name) for path in hang_folders(run)), default=0)
    while True:
        number += 1
        folder = run.hang / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def keep_hang(folder: Path, finding: Finding, *, at_unix_s: float | None = None) -> HangRecord:
    """Record a hang as it was reported, with the combined analysis of the dumps in the folder.

    Called again when more dumps have arrived, or when the same hang is reported again.
    """
    known = read_hang(folder)
    began = known.at_unix_s if known else time.time()
    hang = HangRecord(
        at_unix_s=at_unix_s if at_unix_s is not None else began,
        finding=redacted_evidence(finding),
        analysis=tuple(flight_recorder.analyse_flight_records(dumps_in(folder))),
        folder=folder,
    )
    content = {
        "at_unix_s": hang.at_unix_s,
        "finding": hang.finding.as_json(),
        "analysis": [one.as_json() for one in hang.analysis],
    }
    with contextlib.suppress(OSError):  # a full disk must not stop the run
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / HANG, text, durable=False)
    return hang


def read_hang(folder: Path) -> HangRecord | None:
    """Return the hang recorded in a folder; None if there is none."""
    try:
        content = untrusted.read_json(folder / HANG)
        return HangRecord(
            at_unix_s=unix_s(content["at_unix_s"]),
            finding=finding_from(content["finding"]),
            analysis=tuple(finding_from(one) for one in content["analysis"]),
            folder=folder,
        )
    except (OSError, KeyError, TypeError, ValueError):
        return None


def read_hangs(run: RunFolder) -> list[HangRecord]:
    """Return the reported hangs, oldest first."""
    found = (read_hang(folder) for folder in hang_folders(run))
    return [hang for hang in found if hang is not None]


def hang_folders(run: RunFolder) -> list[Path]:
    """Return the folders of the reported hangs, oldest first."""
    try:
        folders = [path for path in run.hang.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: int(path.name))


_MOST_DUMP_BYTES = 32 * 2**20


def dumps_in(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the flight recorder dumps in a folder, by rank."""
    found = {}
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, untrusted.Unreadable):
            rank, data = _rank_of(path), untrusted.read_bounded(path, _MOST_DUMP_BYTES)
            if rank is not None and (dump := flight_recorder.read_flight_record(data)):
                found[rank] = dump
    return found


def _rank_of(path: Path) -> int | None:
    number = path.name.partition(".")[0].removeprefix("rank-")
    return int(number) if number.isdecimal() else None


# ---- findings on disk


def redacted_evidence(finding: Finding) -> Finding:
    """Return a finding without secrets; parts of it are output of other programs."""
    texts = {key: redact_text(text) for key, text in finding.as_json().items() if key != "status"}
    return Finding(**texts, status=finding.status)


def finding_from(content: Mapping[str, str]) -> Finding:
    """Return the finding stored as JSON; raises KeyError or ValueError if it is not one."""
    texts = {key: str(content[key]) for key in ("name", "what", "why", "fix", "evidence")}
    return Finding(**texts, status=Status(content["status"]))
