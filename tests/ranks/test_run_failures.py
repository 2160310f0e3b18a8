"""What a failed run says: which rank, why, and what to do; once, at the end, whatever came between."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster, Result
from patience import GIVE_UP_S
from ranks.launched import cpu, line_with
from torchmuster.launch.history import run_state
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.ranks

HOST = os.uname().nodename


@pytest.fixture
def run(muster: Muster, own_machine: Path) -> "Run":
    return Run(muster, own_machine)


class Run:
    """Runs a script that fails as two ranks."""

    def __init__(self, muster: Muster, folder: Path) -> None:
        self._muster = muster
        self.folder = folder

    def __call__(self, script: str, *flags: str) -> Result:
        (self.folder / "train.py").write_text(script)
        wide = {"COLUMNS": "400"}
        result = self._muster(*cpu("train.py", *flags), env=wide)
        assert result.code == 1, result
        return result

    def headline(self, result: Result) -> str:
        """Return the one failure that was told; the run's folder says the same."""
        (told,) = [line for line in result.err.splitlines() if line.startswith("failure  ")]
        state = run_state.read_state(list_runs(self.folder / "runs")[0])
        assert state is not None
        assert (state.phase, state.exit_code) == ("failed", 1)
        assert state.headline.splitlines()[0] == told.removeprefix("failure  ")
        return told.removeprefix("failure  ")


def test_the_first_rank_s_traceback_is_told_although_both_raise(
    run: Run, snapshot: SnapshotAssertion
) -> None:
    result = run(
        "import signal, torch.distributed as dist, torch\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # else rank 0 may be ended before it raises
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "def step(rank):\n"
        "    if rank == 1:\n"
        "        raise ValueError('no data')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "step(dist.get_rank())\n",
        "--set",
        "launch.grace=100",
    )
    assert run.headline(result) == f"rank 1 on {HOST} failed: ValueError: no data"
    assert line_with(result.err, "rank 0 then ").strip() == snapshot
    assert "train.py:7" in result.err
    assert "raise ValueError('no data')" in result.err
    (folder,) = (run.folder / "runs").iterdir()
    assert f"log: {folder}/logs/rank-1.log" in result.err
    assert "ValueError: no data" in (folder / "logs" / "rank-1.log").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ending", "what"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit('there is no data')", "there is no data"),
    ],
)
def test_a_rank_that_ends_itself(run: Run, ending: str, what: str) -> None:
    result = run(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(600)\n",
    )
    assert run.headline(result) == f"rank 1 on {HOST} failed: {what}"
    assert "Traceback" not in result.err


def test_a_kill_from_outside_is_explained(run: Run) -> None:
    result = run(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    assert run.headline(result) == f"rank 0 on {HOST} failed: killed (SIGKILL)"
    assert "another process killed it: kill -9" in result.err
    assert "rank 1 then had to stop" in result.err


def test_restarts_begin_anew_and_say_so(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    (own_machine / "train.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', attempt, 'port', os.environ['MASTER_PORT'], flush=True)\n"
        "has_said = Path(f'rank 0 in attempt {attempt}')\n"
        "if os.environ['RANK'] == '0': has_said.touch()\n"
        "while not has_said.exists(): time.sleep(0.01)\n"  # else it might be ended before it says it
        "if attempt < 2 and os.environ['RANK'] == '1': raise ValueError(f'attempt {attempt}')\n"
        "if attempt < 2: time.sleep(600)\n"
    )
    result = muster(*cpu("train.py", "--max-restarts", "2"))
    assert result.code == 0, result
    told = [line for line in result.err.splitlines() if "; restarting" in line]
    for number, line in enumerate(told):
        assert f" rank 1 on {HOST} failed: ValueError: attempt {number}; " in line
        assert line.endswith(f"(restart {number + 1} of 2)")
    assert [line.replace(f" {HOST} ", " HOST ") for line in told] == snapshot
    (run,) = list_runs(own_machine / "runs")
    for rank in (0, 1):
        said = re.findall(r"attempt (\d) port (\d+)", run.rank_log(rank).read_text())
        assert [attempt for attempt, _ in said] == ["0", "1", "2"]
        assert len({port for _, port in said}) == 3  # a store of its own each time
    assert "ValueError: attempt 0" in run.rank_log(1).read_text()
    assert "Traceback" not in run.console.read_text()
    assert json.loads(run.job.read_text())["spec"]["max_restarts"] == 2


def test_ranks_that_are_saving_get_the_whole_grace(muster: Muster, own_machine: Path) -> None:
    # Longer than torchrun's own patience would be.
    (own_machine / "train.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(6); print('saved', os.environ['RANK'], flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "if os.environ['RANK'] == '1': open('other-is-ready', 'w').close()\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists('other-is-ready'): time.sleep(0.05)\n"
        "    os.kill(int(os.environ['TOP']), 15)\n"
        "time.sleep(600)\n"
    )
    (own_machine / "top.py").write_text(
        "import os, sys\nos.environ['TOP'] = str(os.getpid())\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'torchmuster', *sys.argv[1:]])\n"
    )
    done = subprocess.run(
        [sys.executable, "top.py", *cpu("train.py", "--set", "launch.grace=100")],
        cwd=own_machine,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 143, done
    (run,) = list_runs(own_machine / "runs")
    for rank in (0, 1):
        assert f"saved {rank}\n" in run.rank_log(rank).read_text()
