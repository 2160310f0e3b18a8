"""A few kills of the matrix, for every day; all of them by ``stress.kill_matrix``."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rank_group import RunRanks
from rank_programs.from_settings import train_all
from stress.kill_matrix.events import Kill, Layout, Plan
from stress.kill_matrix.judging import Judge
from stress.kill_matrix.moments import Moments
from stress.kill_matrix.struck_run import Ended, settings_of
from torchmuster.runfolder import RunFolder

KILLS = {
    Layout(strategy="ddp", ranks=2): (
        Kill(victim="another rank", moment="collective"),
        Kill(victim="launcher", moment="save"),
        Kill(victim="rank 0", moment="end"),
    ),
    Layout(strategy="fsdp", ranks=2): (
        Kill(victim="rank 0", moment="commit"),
        Kill(victim="agent", moment="restart"),
        Kill(victim="whole node", moment="forward"),
    ),
}


STEPS = 80


@pytest.fixture(scope="module")
def expected(
    run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Layout, Ended]:
    """Train without kills, without checkpoints and without a launcher."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Moments(folder).hurry.touch()
    runs = {
        str(layout): {**settings_of(layout, STEPS), "checkpoint.every": "never"} for layout in KILLS
    }
    run_ranks(train_all, 2, str(folder), runs)
    return {layout: Ended.of(RunFolder(folder / str(layout)), STEPS) for layout in KILLS}


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("layout", KILLS, ids=str)
def test_a_struck_run_ends_with_the_same_losses_and_weights(
    layout: Layout, expected: Mapping[Layout, Ended], tmp_path: Path
) -> None:
    plan = Plan(number=1, layout=layout, kills=KILLS[layout], seed="1")
    judge = Judge(tmp_path, steps=STEPS, tell=print, expected=expected)
    assert judge.judge(plan).problem == ""
