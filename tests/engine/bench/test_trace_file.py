"""The profiler's file: which steps it has, and what is done when it would be too large."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from torchmuster.bench.probes.trace_file import TraceFile
from torchmuster.bench.profile.recording import ProfileRequest, TraceKept

pytestmark = pytest.mark.engine


def traced(folder: Path, **differences: object) -> TraceKept | None:
    """Take ten steps, of which 7 to 9 are asked for."""
    asked = ProfileRequest(
        command=("train.py",), folder=".", ranks=1, device="cpu", first_step=7, last_step=9,
        into=str(folder), **differences,  # type: ignore[arg-type]
    )  # fmt: skip
    file = TraceFile(asked, rank=0)
    layer = torch.nn.Linear(4, 4)
    for step in range(1, 11):
        running = file.before(step)
        assert running == (asked.traces and step in (5, 7, 8, 9)) or asked.trace_most_bytes == 1
        layer(torch.randn(2, 4))
        file.after(step)
    return file.write(10)


def marks(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted({one["name"] for one in events if one["name"].startswith("muster:step#")})


def test_the_steps_asked_for_are_in_the_file_and_those_before_are_not(tmp_path: Path) -> None:
    kept = traced(tmp_path)
    assert kept is not None
    assert (kept.first_step, kept.last_step, kept.why_cut) == (7, 9, "")
    assert marks(tmp_path / kept.file) == ["muster:step#7", "muster:step#8", "muster:step#9"]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.trace.json.gz"]


def test_a_trace_that_would_be_too_large_has_fewer_steps_and_says_so(tmp_path: Path) -> None:
    kept = traced(tmp_path, trace_most_bytes=1)
    assert kept is not None
    assert (kept.first_step, kept.last_step) == (7, 7)
    assert "1 of 3 steps" in kept.why_cut
    assert marks(tmp_path / kept.file) == ["muster:step#7"]


def test_a_trace_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "rank-0.trace.json.gz").write_text("an earlier one")
    with pytest.raises(FileExistsError):
        traced(tmp_path)
    assert (tmp_path / "rank-0.trace.json.gz").read_text() == "an earlier one"


def test_ranks_that_were_not_asked_for_write_none(tmp_path: Path) -> None:
    assert traced(tmp_path, traces=False) is None
    assert not list(tmp_path.iterdir())
