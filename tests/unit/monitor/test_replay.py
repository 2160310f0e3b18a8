"""What alerts a run would have raised, from its lines alone."""

from typing import Any

import pytest

from made_up_runs import LINE
from torchmuster.monitor.alerts.replay import Replay


def _replayed(*changes: dict[str, Any]) -> Replay:
    """Take in lines, each of ten steps of 2 s: a third of a minute."""
    replay = Replay("llm", "r1")
    for at, changed in enumerate(changes, start=1):
        replay.add(LINE | {"step": 10 * at, "skipped_steps": 0} | changed)
    return replay


def test_a_healthy_run_has_none() -> None:
    assert _replayed(*[{}] * 1000).alerts == []


def test_a_loss_that_was_no_number_for_one_line_only_is_told_with_its_steps() -> None:
    (found,) = _replayed(*[{}] * 5, {"loss": None}, *[{}] * 5).alerts
    assert found.alert.name == "MusterLossNotANumber"
    assert "(run r1)" in found.summary
    assert (found.first_step, found.last_step, found.times) == (60, 70, 1)


def test_what_comes_again_is_told_once_and_counted() -> None:
    bad = {"loss": None}
    (found,) = _replayed({}, bad, {}, bad, {}, bad).alerts
    assert (found.times, found.first_step, found.last_step) == (3, 20, None)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{"data_share": 0.5}] * 20, ["MusterDataStarved"]),  # for longer than five minutes
        ([{"data_share": 0.5}] * 5, []),
        ([{}, {"step_s": 40.0}, {}], ["MusterStalled"]),
        ([{}] * 60 + [{"loss": 9.0}] * 12, ["MusterLossSpike"]),
        ([{"skipped_steps": 1}] * 80, ["MusterSkippedSteps"]),
        ([{"step": "x"}, {"step_s": None}, {"loss": "x"}], ["MusterLossNotANumber"]),
    ],
)
def test_each_alert_about_steps(changes: list[dict[str, Any]], names: list[str]) -> None:
    assert [one.alert.name for one in _replayed(*changes).alerts] == names
