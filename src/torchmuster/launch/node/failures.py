"""Reports of the ranks that failed: their exit, what they recorded themselves, and the evidence of the host."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.launch import protocol
from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
from torchmuster.launch.node.ranks import RankProcess

# The root cause shows one whole failure and compares it with the others: of the later ones, only their errors are sent.
_WHOLE_FAILURES = 4
_SHORT_LOG = 500


class _OwnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a rank recorded (``rank/start.py``)."""

    error: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    traceback: str = ""
    exit_code: int | None = None
    at_unix_s: float = 0.0


class _TorchDetails(msgspec.Struct, frozen=True):
    """Details of an error in the file of torch's ``@record``."""

    py_callstack: str = ""
    timestamp: str = "0"  # of the Unix clock, in whole seconds


class _TorchError(msgspec.Struct, frozen=True, rename={"details": "extraInfo"}):
    """An error in the file of torch's ``@record``."""

    message: str
    details: _TorchDetails


class _TorchRecord(msgspec.Struct, frozen=True):
    """The file that torch's ``@record`` writes, also in programs that are started with ``--no-python``."""

    message: _TorchError


def ranks_finished(records: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose script finished."""
    return [rank for rank in ranks if (records / f"rank-{rank}.finished.json").exists()]


def failures_of(
    ranks: Sequence[RankProcess], records: Path, memory: MemoryWatch, peaks: MemoryPeaks
) -> list[protocol.Failure]:
    """Return the failures of these ranks, the earliest first; only these have their traceback and the end of their log.

    A rank without an error of its own keeps its log: nothing else says what happened.
    """
    failures = []
    for rank in ranks:
        failure = _failure(rank, records, memory, peaks)
        if failure is not None:
            failures.append(failure)
    failures.sort(key=lambda failure: -failure.ago_s)
    for index, failure in enumerate(failures[_WHOLE_FAILURES:], start=_WHOLE_FAILURES):
        log = "" if failure.error else failure.last_lines[-_SHORT_LOG:]
        failures[index] = msgspec.structs.replace(failure, traceback="", last_lines=log)
    return failures


def _failure(
    rank: RankProcess, records: Path, memory: MemoryWatch, peaks: MemoryPeaks
) -> protocol.Failure | None:
    own = _own_record(records, rank.rank)
    if own is None and (rank.exit is None or rank.exit.code == 0):
        return None
    own = own or _OwnRecord()
    at_unix_s = own.at_unix_s or (rank.exit.at_unix_s if rank.exit else time.time())
    code = rank.exit.code if rank.exit else 1
    return protocol.Failure(
        rank=rank.rank,
        # One that exited by itself may have got a signal meanwhile.
        exit_code=code if own.exit_code is None else own.exit_code,
        ago_s=max(0.0, time.time() - at_unix_s),
        error=own.error,
        what=own.what,
        why=own.why,
        fix=own.fix,
        traceback=own.traceback,
        last_lines=rank.output.last_lines(),
        evidence=memory.explain(rank.pid, code, peaks) if code else "",
    )


def _own_record(records: Path, rank: int) -> _OwnRecord | None:
    """Return what a rank recorded of its error, by our own code or by torch's ``@record``; else None.

    None also if something else wrote the file.
    """
    try:
        ours = records / f"rank-{rank}.error.json"
        if ours.exists():
            return msgspec.convert(untrusted.read_json(ours), _OwnRecord)
        theirs = untrusted.read_json(records / f"rank-{rank}.torchelastic.json")
        error = msgspec.convert(theirs, _TorchRecord).message
        return _OwnRecord(
            error=error.message,
            traceback=error.details.py_callstack,
            at_unix_s=float(error.details.timestamp),
        )
    except (OSError, untrusted.Unreadable, ValueError):  # msgspec's errors are ValueErrors
        return None
