"""Runs that are asked to end save after one and the same step, and say how to go on."""

import re
import signal
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from ranks.launched import Launched, cpu, launched, line_with
from torchmuster.launch.history import run_state

pytestmark = pytest.mark.ranks


# Longer than a busy machine can keep a rank from saving.
GRACE = ("--set", "launch.grace=100s")
# A loop of one's own, with processes that read for it, which are asked to end as well.
SAVING = """\
import sys, time
from pathlib import Path
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter
from torchmuster.train.stop_request import StoppedAtRequest, StopRequest
from torchmuster.train.world import join_world

class Slow:
    def __len__(self):
        return 4000
    def __getitem__(self, place):
        time.sleep(0.01)
        return float(place)

with join_world("cpu") as world, StopRequest(world) as stop:
    loader = DataLoaderAdapter(DataLoader([0.0] * 4000 if world.is_first else Slow(), num_workers=1), world)
    for step, _ in enumerate(loader.epoch(0), 1):
        time.sleep(0.02)
        dist.barrier()
        if step == 5:
            print("training", world.global_rank, flush=True)
        if stop.due(step):
            time.sleep(0.5)  # saving takes a while
            Path(f"saved-{world.global_rank}").write_text(str(step))
            raise StoppedAtRequest(step, stop.origin)
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "saving.py").write_text(SAVING)
    return own_machine


def test_a_warning_makes_all_ranks_save_and_end_with_the_code_for_going_on(
    folder: Path, snapshot: SnapshotAssertion
) -> None:
    with launched(folder, *cpu("saving.py", *GRACE)) as run:
        run.wait_for("training 0", "training 1")
        run.send(signal.SIGUSR1)
        result = run.end()
        run.wait_until_nothing_lives()
    step = _step_at_which_both_saved(folder)
    assert result.code == 75, run
    words = "saved ", f"step {step} ", "(SIGUSR1 to the launcher)"
    assert _without_numbers(line_with(result.err, *words)) == snapshot
    assert "failure" not in result.err
    _is_written_down(run, step)


def _without_numbers(line: str) -> str:
    line = re.sub(r"step \d+", "step N", line)
    return re.sub(r"after .+?;", "after TIME;", line)


def _step_at_which_both_saved(folder: Path) -> int:
    first, second = (int((folder / f"saved-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    return first


def _is_written_down(run: Launched, step: int) -> None:
    state = run_state.read_state(run.run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("saved", 75)
    assert state.headline.startswith(f"saved at step {step} after a stop request")
