"""GPUs of a run: held while it goes on, free afterwards, however it ends."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from ranks.launched import WAITING, launched
from torchmuster.launch.history import run_state
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.ranks

Machine = Callable[[Scenario], Path]
TELLS = """\
import os
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER"), flush=True)
"""


@pytest.fixture
def server(machine: Machine, own_machine: Path) -> Path:
    """A server of eight idle GPUs, and scripts."""
    machine(scenarios.eight_a100_idle())
    (own_machine / "waiting.py").write_text(TELLS + WAITING)
    return own_machine


def free(muster: Muster) -> set[str]:
    """Return the GPUs that somebody else could have now."""
    for count in range(8, 0, -1):
        picked = muster("gpus", "pick", "--num-gpus", str(count))
        if picked.code == 0:
            return set(picked.out.strip().split(","))
        assert picked.code == 3, picked
    return set()


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_gpus_are_the_run_s_alone_until_it_ends(
    server: Path, muster: Muster, end: signal.Signals
) -> None:
    with launched(server, "run", "--num-gpus", "2", "waiting.py") as run:
        run.wait_for("waiting 0", "waiting 1")
        (seen,) = {line.split()[-2] for line in run.lines if " sees " in line}
        held = set(seen.split(","))
        assert len(held) == 2
        assert all(uuid.startswith("GPU-") for uuid in held)
        others = free(muster)
        assert len(others) == 6
        assert not held & others
        run.send(end)
        run.end()
        run.wait_until_nothing_lives()
        assert len(free(muster)) == 8


def test_more_ranks_than_gpus_is_one_sentence_and_no_process(
    server: Path, muster: Muster, snapshot: SnapshotAssertion
) -> None:
    for words in (["--num-gpus", "9"], ["--ranks", "9"]):
        result = muster("run", *words, "waiting.py")
        assert (result.code, result.out) == (2, "")
        (told,) = [line for line in result.err.splitlines() if line.startswith("failure  ")]
        assert "9 GPUs requested, 8 available" in told
        assert told == snapshot(name="told")
        assert "started" not in result.err
    for run in list_runs(server / "runs"):
        state = run_state.read_state(run)
        assert state is not None
        assert (state.phase, state.exit_code) == ("failed", 2)
        assert list(run.logs.iterdir()) == []


@pytest.mark.nightly
def test_gpus_in_use_end_it_at_once_or_are_waited_for(server: Path, muster: Muster) -> None:
    (server / "tells.py").write_text(TELLS)
    with launched(server, "run", "--gpu-ids", "0,1", "--", "waiting.py") as first:
        first.wait_for("waiting 0", "waiting 1")
        busy = muster("run", "--gpu-ids", "1,2", "tells.py")
        assert busy.code == 3
        assert ": claimed by" in busy.err
        assert "muster: 2 ranks started" not in busy.err
        words = ["run", "--gpu-ids", "1", "--wait=1s", "tells.py"]
        assert muster(*words).code == 3
        words = ["run", "--gpu-ids", "1,2", "--wait", "tells.py"]
        with launched(server, *words) as second:
            second.wait_for("muster: waiting for devices on")
            assert any(os.uname().nodename in line for line in second.lines)
            first.send(signal.SIGINT)
            first.end()
            result = second.end()
        assert result.code == 0, second
        assert len([line for line in result.out.splitlines() if "sees GPU-" in line]) >= 1
