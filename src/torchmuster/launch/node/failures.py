"""Reports of the ranks that failed: their exit, what they recorded themselves, and the evidence of the host."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmuster import untrusted
from torchmuster.launch import protocol
from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
from torchmuster.launch.node.ranks import RankProcess

# The root cause shows one complete failure and compares it with the others; a hundred would be too much.
_COMPLETE, _COMPLETE_OF_MANY, _MANY_HOSTS = 16, 2, 64
_SHORT_ERROR, _SHORT_LOG = 200, 500


def ranks_finished(records: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose script finished."""
    return [rank for rank in ranks if (records / f"rank-{rank}.finished.json").exists()]


def failures_of(
    ranks: Sequence[RankProcess],
    records: Path,
    memory: MemoryWatch,
    peaks: MemoryPeaks,
    *,
    hosts: int,
) -> list[protocol.Failure]:
    """Return the failures of these ranks; of many, only the earliest are complete."""
    failures = [_failure(rank, records, memory, peaks) for rank in ranks]
    failed = [failure for failure in failures if failure is not None]
    complete = _COMPLETE if hosts <= _MANY_HOSTS else _COMPLETE_OF_MANY
    return _shorten_later(failed, complete)


def _failure(
    rank: RankProcess, records: Path, memory: MemoryWatch, peaks: MemoryPeaks
) -> protocol.Failure | None:
    own = _own_record(records, rank.rank)
    if not own and (rank.exit is None or rank.exit.code == 0):
        return None
    at = own.get("at_unix_s") or (rank.exit.at_unix_s if rank.exit else time.time())
    code = rank.exit.code if rank.exit else 1
    own_code = own.get("exit_code")
    return protocol.Failure(
        rank=rank.rank,
        # One that exited by itself may have got a signal meanwhile.
        exit_code=own_code if isinstance(own_code, int) else code,
        ago_s=max(0.0, time.time() - float(at)),
        error=_text(own, "error"),
        what=_text(own, "what"),
        why=_text(own, "why"),
        fix=_text(own, "fix"),
        traceback=_text(own, "traceback"),
        last_lines=rank.output.last_lines(),
        evidence=memory.explain(rank.pid, code, peaks) if code else "",
    )


def _own_record(records: Path, rank: int) -> Mapping[str, Any]:
    """Return what the rank recorded of its error: our own record, else that of torch's ``@record``."""
    own = untrusted.read_json_object(records / f"rank-{rank}.error.json")
    if own:
        return own
    message = untrusted.read_json_object(records / f"rank-{rank}.torchelastic.json").get("message")
    if not isinstance(message, dict):
        return {}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return {
        "error": message.get("message", ""),
        "traceback": extra.get("py_callstack", ""),
        "at_unix_s": _seconds(extra.get("timestamp")),
    }


def _seconds(timestamp: object) -> float | None:
    try:
        return float(str(timestamp))
    except ValueError:
        return None


def _shorten_later(failures: Sequence[protocol.Failure], complete: int) -> list[protocol.Failure]:
    """Shorten all failures except the earliest ones, so that any number fits into a message."""
    by_time = sorted(failures, key=lambda failure: -failure.ago_s)
    earliest = {failure.rank for failure in by_time[:complete]}
    return [failure if failure.rank in earliest else _shortened(failure) for failure in failures]


def _shortened(failure: protocol.Failure) -> protocol.Failure:
    last_lines = failure.last_lines
    if failure.traceback:  # else only the log shows what happened
        last_lines = ""
    return msgspec.structs.replace(
        failure,
        error=failure.error[:_SHORT_ERROR],
        what=failure.what[:_SHORT_ERROR],
        why="",
        fix="",
        traceback="",
        last_lines=last_lines[-_SHORT_LOG:],
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    """Return a text of a record; lone surrogates, as in odd file names, are escaped."""
    text = record.get(name, "")
    text = text if isinstance(text, str) else json.dumps(text)
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
