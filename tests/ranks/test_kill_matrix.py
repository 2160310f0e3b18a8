"""A few kills of the matrix, for every day; all of them by ``stress.kill_matrix``."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs.from_settings import train_all
from stress.kill_matrix.events import LAYOUTS, MOMENTS, VICTIMS, Kill, Layout, Plan, plans
from stress.kill_matrix.judging import Judge, difference
from stress.kill_matrix.moments import Moments
from stress.kill_matrix.struck_run import Ended, settings_of
from stress.kill_matrix.table import Result, render
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


def test_every_victim_is_struck_at_every_moment_in_every_layout() -> None:
    pairs = set(itertools.product(VICTIMS, MOMENTS[:-1]))
    drawn = list(plans(len(LAYOUTS) * 48, seed=3, of_a_run=8))
    for layout in LAYOUTS:
        kills = [kill for plan in drawn if plan.layout == layout for kill in plan.kills[:-1]]
        assert {(kill.victim, kill.moment) for kill in kills} == pairs
    assert {plan.kills[-1] for plan in drawn} == {
        Kill(victim=victim, moment="end") for victim in VICTIMS
    }
    assert drawn == list(plans(len(LAYOUTS) * 48, seed=3, of_a_run=8))
    assert [len(plan.kills) for plan in plans(10, seed=3, of_a_run=8)] == [8, 2]


def test_the_smallest_difference_is_one(snapshot: SnapshotAssertion) -> None:
    expected = Ended(losses={1: 0.5, 2: 0.25}, weights_sha256="a")
    assert difference(expected, expected) == ""
    other = Ended(losses={1: 0.5, 2: 0.25 + 2**-54}, weights_sha256="a")
    assert "step 2 " in difference(expected, other)
    assert difference(expected, other) == snapshot
    other = Ended(losses=expected.losses, weights_sha256="b")
    assert difference(expected, other) == snapshot


def test_the_tables_count_kills_and_runs(snapshot: SnapshotAssertion) -> None:
    layout, kills = next(iter(KILLS.items()))
    plan = Plan(number=1, layout=layout, kills=kills, seed="1")
    good, bad = Result(plan=plan, problem=""), Result(plan=plan, problem="it ended")
    text = render([good, good], seed=1, took_s=120)
    assert "\n6 kills in 2 runs (seed 1, 2 minutes " in text
    assert re.sub(r"on \d+ cores", "on N cores", text) == snapshot
    assert "| rank 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 2 |\n" in text
    assert "| ddp on 2 ranks | 2 | 6 | 2 |\n" in text
    text = render([good, bad], seed=1, took_s=120)
    assert re.sub(r"on \d+ cores", "on N cores", text) == snapshot
    assert "| ddp on 2 ranks | 2 | 6 | 1 |\n" in text
