"""Changes that can be tried, what a trial shows, and what a profile's folder says when it is not one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_profiles import rank, step
from torchmuster.cli.output import new_folder
from torchmuster.errors import MusterError
from torchmuster.profile import trials
from torchmuster.profile.facts import (
    Change,
    ProfileRequest,
    RankFacts,
    Trial,
    Trials,
    read_facts,
    read_json,
)
from torchmuster.profile.trials import with_change

REQUEST = ProfileRequest(
    command=("train.py",), folder=".", ranks=2, device="cpu", first_step=9, last_step=10
)


def test_a_larger_batch_is_judged_by_its_samples_not_by_its_steps() -> None:
    trial = Trial(
        change=Change(kind="batch", value=8), before_s=(0.1, 0.12, 0.11), after_s=(0.2, 0.22, 0.25),
        samples_factor=8.0,
    )  # fmt: skip
    assert trial.gain == pytest.approx(0.11 / 0.22 * 8)
    assert trial.low == pytest.approx(0.1 / 0.22 * 8), "the slowest of three is not counted"


def test_a_disturbed_run_of_three_does_not_hide_a_gain() -> None:
    change = Change(kind="buckets", value=3)
    two = Trial(change=change, before_s=(0.29, 0.30), after_s=(0.29, 0.17))
    assert (two.low, two.is_unclear) == (1.0, True)
    three = replace(two, before_s=(0.29, 0.30, 0.31), after_s=(0.29, 0.17, 0.18))
    assert three.low == pytest.approx(0.29 / 0.18)
    assert not three.is_unclear
    without = Trial(change=change, before_s=(0.29, 0.30), after_s=(0.29, 0.30))
    assert not without.is_unclear, "nothing says that there is a gain"


def recorded(times_s: dict[Change | None, list[float]]) -> Callable[..., list[RankFacts]]:
    """Return a recorder that never runs anything; the runs of a change take these times."""
    left = {change: iter(seconds) for change, seconds in times_s.items()}

    def record(request: ProfileRequest, say: Any) -> list[RankFacts]:
        return [rank(steps=[step(4, took_s=next(left[request.change]))])]

    return record


def test_trials_that_are_unclear_are_made_again_one_change_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clear, unclear = Change(kind="threads", value=1), Change(kind="buckets", value=3)
    times_s = {None: [0.3, 0.3, 0.3], clear: [0.2, 0.2], unclear: [0.3, 0.17, 0.17]}
    monkeypatch.setattr(trials, "record_profile", recorded(times_s))
    lines: list[str] = []
    tried = trials.try_changes(REQUEST, (clear, unclear), say=lines.append)
    assert [trial.after_s for trial in tried] == [(0.2, 0.2), (0.3, 0.17, 0.17)]
    assert "3 MiB" in lines[-1]


def test_a_change_that_fails_or_is_unused_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, unused = Change(kind="workers", value=2), Change(kind="buckets", value=3)

    def record(request: ProfileRequest, say: Any) -> list[RankFacts]:
        if request.change == failing:
            raise MusterError("train.py failed", why="out of memory")
        return [rank(change_unused=request.change == unused)]

    monkeypatch.setattr(trials, "record_profile", record)
    lines: list[str] = []
    assert trials.try_changes(REQUEST, (failing, unused), say=lines.append) == []
    assert any("out of memory" in line for line in lines)
    assert any("had no effect" in line for line in lines)


def test_a_folder_that_is_no_profile_is_said_to_be_none(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(MusterError, match=str(tmp_path)) as refused:
        read_facts(tmp_path)
    assert refused.value == snapshot
    with pytest.raises(MusterError, match=r"trials\.json") as refused:
        read_json(tmp_path / "trials.json", Trials)
    assert refused.value == snapshot
    (tmp_path / "rank-0.facts.json").write_text("{}")
    with pytest.raises(MusterError, match=r"rank-0\.facts\.json") as refused:
        read_facts(tmp_path)
    assert refused.value == snapshot


def test_two_results_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({new_folder(tmp_path / "profile") for _ in range(5)}) == 5


@pytest.mark.parametrize(
    ("settings", "change", "changed"),
    [
        ((), Change(kind="workers", value=4), ("data.workers=4",)),
        ((), Change(kind="bf16"), ("train.precision=bf16",)),
        ((), Change(kind="batch", value=2), ("train.micro_batch_size=16",)),
        (
            ("--set", "train.global_batch_size=64"),
            Change(kind="batch", value=2),
            ("train.global_batch_size=128", "train.micro_batch_size=16"),
        ),
        (
            ("--set", "train.global_batch_size=8", "--set", "train.micro_batch_size=16"),
            Change(kind="batch", value=4),
            ("train.global_batch_size=32", "train.micro_batch_size=16"),
        ),
    ],
)
def test_a_training_from_settings_is_changed_by_settings(
    settings: tuple[str, ...], change: Change, changed: tuple[str, ...]
) -> None:
    request = replace(
        REQUEST, command=("torchmuster.worker", *settings), module=True, with_run_folder=True
    )
    result = with_change(request, change)
    added = result.command[len(request.command) :]
    assert added[1::2] == changed
    assert set(added[::2]) == {"--set"}
    assert result.change is None
    script = replace(request, with_run_folder=False)
    assert with_change(script, change) == replace(script, change=change)
