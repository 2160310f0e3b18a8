"""Changes that can be tried, what a trial shows, and what a profile's folder says when it is not one."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.profile import capture
from torchmuster.bench.profile.capture import new_folder, with_change
from torchmuster.bench.profile.changes import ChangeTrial, TriedChange, parse_change
from torchmuster.bench.profile.recording import ProfileRequest, read_facts
from torchmuster.errors import Impossible, MusterError


def test_a_change_is_written_as_it_is_read() -> None:
    change = TriedChange(kind="workers", value=4)
    assert parse_change(change.written) == change
    assert str(change) == "4 loader workers"


@pytest.mark.parametrize("text", ["workers", "workers=", "workers=-1", "workers=0", "luck=4"])
def test_what_is_no_change_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(Impossible, match="unknown change") as caught:
        parse_change(text)
    assert "workers=N" in caught.value.why


def test_a_larger_batch_is_judged_by_its_samples_not_by_its_steps() -> None:
    trial = ChangeTrial(
        change=TriedChange(kind="batch", value=8),
        before_s=(0.1, 0.12, 0.11),
        after_s=(0.2, 0.22, 0.25),
        samples_factor=8.0,
    )
    assert trial.gain == pytest.approx(0.11 / 0.22 * 8)
    assert trial.low == pytest.approx(0.1 / 0.22 * 8), "the slowest of three is not counted"
    assert trial.high == pytest.approx(0.11 / 0.2 * 8)


def test_one_disturbed_run_of_three_does_not_hide_a_gain() -> None:
    change = TriedChange(kind="buckets", value=3)
    two = ChangeTrial(change=change, before_s=(0.29, 0.30), after_s=(0.29, 0.17))
    assert (two.low, two.is_unclear) == (1.0, True)
    three = replace(two, before_s=(0.29, 0.30, 0.31), after_s=(0.29, 0.17, 0.18))
    assert three.low == pytest.approx(0.29 / 0.18)
    assert not three.is_unclear
    without = ChangeTrial(change=change, before_s=(0.29, 0.30), after_s=(0.29, 0.30))
    assert not without.is_unclear, "nothing says that there is a gain"


def test_trials_that_are_unclear_are_made_again(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    clear, unclear = TriedChange(kind="threads", value=1), TriedChange(kind="buckets", value=3)
    takes = {None: [0.3, 0.3, 0.3], clear: [0.2, 0.2], unclear: [0.3, 0.17, 0.17]}
    now = {change: iter(taken) for change, taken in takes.items()}
    monkeypatch.setattr(capture, "with_change", lambda asked, change: change)
    monkeypatch.setattr(
        capture, "_run_capture", lambda asked, say: [SimpleNamespace(trouble=(), at=asked)]
    )
    monkeypatch.setattr(capture, "measured_step_s", lambda facts: next(now[facts[0].at]))
    said: list[str] = []
    trials = capture.try_changes(None, (clear, unclear), rounds=2, say=said.append)  # type: ignore[arg-type]
    assert [one.after_s for one in trials] == [(0.2, 0.2), (0.3, 0.17, 0.17)]
    assert "3 MiB" in said[-1]
    assert said[-2:] == snapshot


def test_trials_are_kept_with_the_profile(tmp_path: Path) -> None:
    trial = ChangeTrial(
        change=TriedChange(kind="threads", value=1), before_s=(0.2,), after_s=(0.1,)
    )
    capture.write_trials(tmp_path, [trial], trial)
    assert capture.read_trials(tmp_path) == ((trial,), trial)
    assert capture.read_trials(tmp_path / "another") == ((), None)


def test_a_folder_that_is_no_profile_is_said_to_be_none(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(MusterError, match=str(tmp_path)) as refused:
        read_facts(tmp_path)
    assert refused.value == snapshot
    with pytest.raises(MusterError, match=r"profile\.json") as refused:
        capture.read_asked(tmp_path)
    assert refused.value == snapshot
    (tmp_path / "rank-0.facts.json").write_text("{}")
    with pytest.raises(MusterError, match=r"rank-0\.facts\.json") as refused:
        read_facts(tmp_path)
    assert refused.value == snapshot


def test_two_profiles_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {new_folder(tmp_path / "profile") for _ in range(5)}
    assert len(folders) == 5


@pytest.mark.parametrize(
    ("given", "change", "told"),
    [
        ((), TriedChange(kind="workers", value=4), ("data.workers=4",)),
        ((), TriedChange(kind="bf16"), ("train.precision=bf16",)),
        ((), TriedChange(kind="batch", value=2), ("train.micro_batch_size=16",)),
        (
            ("--set", "train.global_batch_size=64"),
            TriedChange(kind="batch", value=2),
            ("train.global_batch_size=128", "train.micro_batch_size=16"),
        ),
        (
            ("--set", "train.global_batch_size=8", "--set", "train.micro_batch_size=16"),
            TriedChange(kind="batch", value=4),
            ("train.global_batch_size=32", "train.micro_batch_size=16"),
        ),
    ],
)
def test_a_training_from_settings_is_changed_by_settings(
    given: tuple[str, ...], change: TriedChange, told: tuple[str, ...]
) -> None:
    asked = ProfileRequest(
        command=("torchmuster.worker", *given), module=True, with_run_folder=True, folder=".",
        ranks=2, device="cpu", first_step=9, last_step=10,
    )  # fmt: skip
    changed = with_change(asked, change)
    words = [word for one in told for word in ("--set", one)]
    assert changed.command == (*asked.command, *words)
    assert changed.changes == ()
    script = replace(asked, with_run_folder=False)
    assert with_change(script, change) == replace(script, changes=(change,))
