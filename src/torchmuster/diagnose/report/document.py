"""A check as plain data, for programs: check.json."""

import json
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.result import GroupResult
from torchmuster.finding import exit_code, worst_first

# Raised when a key changes its meaning or goes away; new keys may come at any time.
SCHEMA = 1


def as_json(result: GroupResult) -> dict[str, Any]:
    """Return everything that a check learnt, as plain JSON types."""
    return {
        "schema": SCHEMA,
        "passed": exit_code(result.findings) == 0,
        "seconds": round(result.seconds, 1),
        "machines": [_plain(machine) for machine in result.machines],
        "findings": [finding.as_json() for finding in worst_first(result.findings)],
        "not_tried": list(result.not_tried),
        "links": [_link(link) for link in result.links],
        "ranks": [_plain(rank) for rank in result.ranks],
    }


def to_text(result: GroupResult) -> str:
    """Return it as the text of a file."""
    return json.dumps(as_json(result), indent=1, ensure_ascii=False) + "\n"


def _plain(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _link(link: Link) -> dict[str, Any]:
    figures = link.figures
    return {
        "from": link.source.name,
        "to": link.target.name,
        "address": link.target.address,
        "problem": link.problem,
        "meeting_problem": link.meeting_problem,
        "bytes_per_s": figures and figures.bytes_per_s,
        "round_trip_s": figures and figures.round_trip_s,
        "loss": figures and figures.loss,
        "frame_bytes": figures and figures.frame_bytes,
        "stalled": bool(figures and figures.stalled),
        "wrong_bytes": figures.wrong_bytes if figures else 0,
        "retransmits": figures and figures.retransmits,
    }
