"""Changes are tried one at a time, in turns with the unchanged training."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from made_up_profiles import rank, step
from torchmuster.errors import MusterError
from torchmuster.profile import trials
from torchmuster.profile.facts import Change, ProfileRequest, RankFacts
from torchmuster.profile.trials import try_changes, with_change

REQUEST = ProfileRequest(
    command=("train.py",), folder=".", ranks=2, device="cpu", first_step=9, last_step=10
)


def recorded(
    times_s: dict[Change | None, list[float]],
) -> Callable[..., list[RankFacts]]:
    """Return a recorder whose runs take these times, one after the other."""
    left: dict[Change | None, Iterator[float]] = {
        change: iter(seconds) for change, seconds in times_s.items()
    }

    def record(request: ProfileRequest, say: Any) -> list[RankFacts]:
        return [rank(steps=[step(4, took_s=next(left[request.change]))])]

    return record


def test_the_fastest_runs_without_and_with_a_change_give_its_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, batch = Change(kind="threads", value=1), Change(kind="batch", value=8)
    times_s = {None: [0.3, 0.36], threads: [0.25, 0.2], batch: [0.6, 0.9]}
    monkeypatch.setattr(trials, "record_profile", recorded(times_s))
    lines: list[str] = []
    gains = try_changes(REQUEST, (threads, batch), say=lines.append)
    assert gains[threads] == pytest.approx(1.5)
    assert gains[batch] == pytest.approx(4.0)  # eight times the samples in twice the time
    assert len(lines) == 6
    assert "8 times the batch" in lines[-1]


def test_a_change_that_fails_or_is_unused_has_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, unused = Change(kind="workers", value=2), Change(kind="buckets", value=3)

    def record(request: ProfileRequest, say: Any) -> list[RankFacts]:
        if request.change == failing:
            raise MusterError("train.py failed", why="out of memory")
        return [rank(change_unused=request.change == unused)]

    monkeypatch.setattr(trials, "record_profile", record)
    lines: list[str] = []
    assert try_changes(REQUEST, (failing, unused), say=lines.append) == {}
    assert any("out of memory" in line for line in lines)
    assert any("had no effect" in line for line in lines)


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
