"""What the ranks and the agent wrote down about themselves, read by the keeper."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.errors import ExitCode
from torchmuster.launch import protocol

_LAST_LINES = 30
_LAST_BYTES = 8 * 1024
# The verdict shows one failure whole and compares it with the others; a hundred would be too much.
_TOLD_WHOLE = 16
_SHORT_ERROR = 200


def pids(records: Path) -> dict[int, int]:
    """Return the process of each rank that has begun."""
    found = {}
    for path in records.glob("rank-*.json"):
        if path.name.count(".") == 1:
            found[int(path.stem.removeprefix("rank-"))] = int(_read(path).get("pid", 0))
    return found


def finished(records: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose script ended well."""
    return [rank for rank in ranks if (records / f"rank-{rank}.finished.json").exists()]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank's process ended: its exit code (negative: a signal), and when that was noticed."""

    pid: int
    code: int
    at_unix_s: float


def failures(
    records: Path,
    logs: Path,
    ranks: Iterable[int],
    exits: Mapping[int, Exit],
    evidence: Mapping[int, str],
    peaks: Mapping[int, int],
    began: Mapping[int, int],
) -> list[protocol.Failure]:
    """Return the ranks that failed, with what each of them and the machine knows of the cause.

    A rank that left an error of its own, but was ended before its exit was noticed, is among them.
    ``began`` is where in each rank's log this attempt begins.
    """
    found = []
    for local_rank, rank in enumerate(ranks):
        own = _read(records / f"rank-{rank}.error.json")
        if rank not in exits and not own:
            continue
        seen = exits.get(rank)
        at = own.get("at_unix_s") or (seen.at_unix_s if seen else time.time())
        found.append(
            protocol.Failure(
                rank=rank,
                local_rank=local_rank,
                exit_code=_exit_code(seen, own),
                ago_s=max(0.0, time.time() - float(at)),
                error=_text(own, "error"),
                what=_text(own, "what"),
                why=_text(own, "why"),
                fix=_text(own, "fix"),
                traceback=_text(own, "traceback"),
                last_lines=last_lines(logs / f"rank-{rank}.log", began.get(rank, 0)),
                peak_rss_bytes=peaks.get(rank),
                evidence=evidence.get(rank, ""),
            )
        )
    return _cut_later(found, _TOLD_WHOLE, _error_alone)


def _exit_code(seen: Exit | None, own: Mapping[str, Any]) -> int:
    """Return how a rank ended; one that saved may have been sent a signal on its way out."""
    if own.get("exit_code") == ExitCode.SAVED or seen is None:
        code = own.get("exit_code")
        return code if isinstance(code, int) else 1
    return seen.code


def fitting(ended: protocol.Ended) -> protocol.Ended:
    """Return how an attempt ended so that it fits into a message: if need be, only the first whole."""
    if len(protocol.to_lines(ended)) <= protocol.MESSAGE_LIMIT:
        return ended
    return msgspec.structs.replace(
        ended, failures=tuple(_cut_later(ended.failures, 1, _short_error_alone))
    )


def _cut_later(
    failures: Sequence[protocol.Failure],
    whole: int,
    cut: Callable[[protocol.Failure], protocol.Failure],
) -> list[protocol.Failure]:
    """Cut all failures but the first in time."""
    by_time = sorted(failures, key=lambda one: -one.ago_s)
    first = {one.rank for one in by_time[:whole]}
    return [one if one.rank in first else cut(one) for one in failures]


def _error_alone(failure: protocol.Failure) -> protocol.Failure:
    if not failure.traceback:  # then it is the log that says what happened
        return failure
    return msgspec.structs.replace(failure, traceback="", last_lines="")


def _short_error_alone(failure: protocol.Failure) -> protocol.Failure:
    error, what = failure.error[:_SHORT_ERROR], failure.what[:_SHORT_ERROR]
    return msgspec.structs.replace(
        failure, error=error, what=what, why="", fix="", traceback="", last_lines=""
    )


def agent_exits(records: Path) -> dict[int, Exit]:
    """Return how each rank ended that the agent saw failing."""
    return {
        int(one["rank"]): Exit(
            pid=int(one["pid"]), code=int(one["exit_code"]), at_unix_s=float(one["at_unix_s"])
        )
        for one in _read(records / "agent.json").get("failures", [])
    }


def last_lines(path: Path, began: int) -> str:
    """Return the end of a log, of what was written after ``began`` bytes."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(began, stream.tell() - _LAST_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _text(record: Mapping[str, Any], name: str) -> str:
    """Return a text of a record; halves of characters, as in odd file names, cannot travel."""
    return str(record.get(name, "")).encode("utf-8", errors="backslashreplace").decode("utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
