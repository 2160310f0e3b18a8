"""What the ranks and the agent wrote down about themselves, read by the keeper."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.launch import wire

_LAST_LINES = 30
_LAST_BYTES = 8 * 1024


def pids(records: Path) -> dict[int, int]:
    """Return the process of each rank that has begun."""
    found = {}
    for path in records.glob("rank-*.json"):
        if path.name.count(".") == 1:
            found[int(path.stem.removeprefix("rank-"))] = int(_read(path).get("pid", 0))
    return found


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
) -> list[wire.Failure]:
    """Return the ranks that failed, with what each of them and the machine knows of the cause.

    A rank that left an error of its own, but was ended before its exit was noticed, is among them.
    """
    found = []
    for local_rank, rank in enumerate(ranks):
        own = _read(records / f"rank-{rank}.error.json")
        if rank not in exits and not own:
            continue
        seen = exits.get(rank)
        at = own.get("at_unix_s") or (seen.at_unix_s if seen else time.time())
        found.append(
            wire.Failure(
                rank=rank,
                local_rank=local_rank,
                exit_code=seen.code if seen else 1,
                ago_s=max(0.0, time.time() - float(at)),
                error=str(own.get("error", "")),
                traceback=str(own.get("traceback", "")),
                last_lines=last_lines(logs / f"rank-{rank}.log"),
                peak_rss_bytes=peaks.get(rank),
                evidence=evidence.get(rank, ""),
            )
        )
    return found


def agent_exits(records: Path) -> dict[int, Exit]:
    """Return how each rank ended that the agent saw failing."""
    return {
        int(one["rank"]): Exit(
            pid=int(one["pid"]), code=int(one["exit_code"]), at_unix_s=float(one["at_unix_s"])
        )
        for one in _read(records / "agent.json").get("failures", [])
    }


def last_lines(path: Path) -> str:
    """Return the end of a log."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _LAST_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
