"""Launching when the machines cannot even be called: said as every other failure is."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchmuster.errors import Impossible
from torchmuster.launch import ledger, wire
from torchmuster.launch.channel import Arrive
from torchmuster.launch.launcher import launch
from torchmuster.launch.spec import JobSpec
from torchmuster.launch.voice import TerminalVoice
from torchmuster.runfolder import create


class Unreachable:
    """A transport that cannot be opened."""

    def __init__(self) -> None:
        self.closed = 0

    @property
    def places(self) -> Sequence[str]:
        return ["a", "b"]

    async def open(self, arrive: Arrive) -> None:
        raise Impossible("port 29400 cannot be opened", why="it is in use", fix="--port 29500")

    async def reopen(self, place: int) -> None:
        raise NotImplementedError

    def waiting_for(self, place: int) -> str:
        return "nothing"

    def gave_up(self, place: int) -> wire.Trouble | None:
        return None

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        self.closed += 1


def test_a_way_that_cannot_be_opened_is_told_written_down_and_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = create(tmp_path, "train")
    transport = Unreachable()
    spec = JobSpec(name="train", command=("train.py",), folder=str(tmp_path))
    assert launch(spec, transport, run, TerminalVoice) == 2
    assert capfd.readouterr().err == (
        f"muster: run {run.id}\n"
        "failure  port 29400 cannot be opened\n"
        "         why  it is in use\n"
        "         fix  --port 29500\n"
    )
    state = ledger.read_state(run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("failed", 2)
    assert state.headline == "port 29400 cannot be opened"
    assert transport.closed == 1
    assert json.loads(run.job.read_text())["command"] == ["train.py"]
