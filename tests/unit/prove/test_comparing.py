"""The first difference between made-up runs."""

from collections.abc import Callable

import pytest

from torchmuster.prove.comparing import (
    compare_repeated,
    compare_resumed,
)
from torchmuster.prove.comparing_ranks import compare_ranks
from torchmuster.prove.records import (
    EventRecord,
    PlannedStop,
    ResumeTrial,
    StepRecord,
    TrialRecord,
)
from torchmuster.prove.scaling import Variation, compare_scaled
from torchmuster.prove.stops import stops_for
from unit.prove.made_up_trials import step_record, trial

Change = Callable[[StepRecord, int], None]
WHOLE = trial(range(1, 13), saves=(3, 6, 9))


def resumed(
    second: TrialRecord, *, saves: tuple[int, ...] = (3, 6), torn: bool = False
) -> ResumeTrial:
    return ResumeTrial(
        stop=PlannedStop(name="save-killed" if torn else "killed", after_step=7),
        stopped=trial(range(1, 8), saves=saves),
        resumed=second,
    )


def change(at: int = 7, only_rank: int | None = None, **fields: object) -> Change:
    """Return a change of these fields of all steps from ``at`` on."""

    def changed(step: StepRecord, rank: int) -> None:
        if step.step >= at and only_rank in (None, rank):
            for name, value in fields.items():
                setattr(step, name, value)

    return changed


def other_data(step: StepRecord, rank: int) -> None:
    """Change the result on all ranks, and the samples of rank 1 only."""
    step.gradients, step.replicated_square = "others", 5.0
    if rank == 1:
        step.micro_batches[0].inputs = "others"


RESULT = {"gradients": "others", "replicated_square": 5.0}
RESUMED_OTHERWISE: dict[str, tuple[Change, tuple[str, int] | None]] = {
    "nothing": (change(), None),
    "optimizer not loaded": (change(state_before={}), ("optimizer-state", 7)),
    "optimizer settings": (change(settings="{}, 1"), ("optimizer-state", 7)),
    "optimizer state": (change(state={"exp_avg": "0", "step": "1"}), ("optimizer-state", 7)),
    "buffers": (change(buffers="others"), ("buffers", 7)),
    "scale": (change(scale=65536.0), ("loss-scale", 7)),
    "learning rate": (change(learning_rates=[0.5]), ("learning-rate", 7)),
    "a later learning rate": (change(at=9, learning_rates=[0.5]), ("learning-rate", 9)),
    "average": (change(copies=["ema-of-weights"]), ("weight-copy", 7)),
    "weights": (change(weights=["x", "y"]), ("weights", 7)),
    "weights of no step": (change(weights_before=["half", "precision"]), ("weights", 6)),
    "dropout": (change(rng={"torch": "other", "python": "always"}, **RESULT), ("rng", 7)),
    "computation": (change(**RESULT), ("computation", 7)),
    # No step draws from Python's generator, so it cannot be the cause.
    "an unused generator": (
        lambda step, rank: change(rng={**step.rng, "python": "another"}, **RESULT)(step, rank),
        ("computation", 7),
    ),
    "random states without an effect": (change(rng={"torch": "another"}), None),
    "no optimizer, nearly equal weights": (
        change(state_before={}, weights=["nearly", "equal"]),
        ("optimizer-state", 7),
    ),
    "samples of one rank": (other_data, ("data-order", 7)),
}


@pytest.mark.parametrize("name", RESUMED_OTHERWISE)
def test_the_first_thing_that_is_not_restored_is_named(name: str) -> None:
    changed, expected = RESUMED_OTHERWISE[name]
    found = compare_resumed(WHOLE, resumed(trial(range(7, 13), change=changed)))
    assert found.rounding == 0
    if expected is None:
        assert found.difference is None
    else:
        assert found.difference is not None
        assert (found.difference.kind, found.difference.step) == expected


def test_another_order_of_additions_is_rounding() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.gradients, step.weights = f"rounded-{step.step}", ["rounded", "rounded"]
        step.state = {"exp_avg": "rounded", "step": str(step.step)}
        step.replicated_square *= 1 + 1e-7

    found = compare_resumed(WHOLE, resumed(trial(range(7, 13), change=changed)))
    assert found.difference is None
    assert 0 < found.rounding < 1e-6


def test_data_that_is_read_again() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step - 2, rank).micro_batches

    found = compare_resumed(WHOLE, resumed(trial(range(7, 13), change=changed))).difference
    assert found is not None
    assert (found.kind, found.step, found.line) == ("data-order", 7, "train.py:7")
    assert "the last 2 batches are repeated" in found.what


def test_skipped_data() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step + 1, rank).micro_batches

    found = compare_resumed(WHOLE, resumed(trial(range(7, 12), change=changed))).difference
    assert found is not None
    assert "the next 1 batches are skipped" in found.what


def test_lost_micro_batches() -> None:
    def twice(step: StepRecord, rank: int) -> None:
        step.micro_batches = step.micro_batches * 2

    def lost(step: StepRecord, rank: int) -> None:
        if step.step != 7:
            twice(step, rank)

    whole = trial(range(1, 13), change=twice)
    found = compare_resumed(whole, resumed(trial(range(7, 13), change=lost))).difference
    assert found is not None
    assert found.kind == "accumulation"


@pytest.mark.parametrize(
    ("second", "saves", "torn", "kind"),
    [
        (trial(range(1, 13)), (3, 6), False, "started-from-zero"),
        (trial(range(4, 13)), (3, 6), False, "older-checkpoint"),
        (trial(range(7, 7), trouble="rank 0: KeyError: 'model'"), (3, 6), False, "resume-failed"),
        (trial(range(7, 7), trouble="rank 0: EOFError"), (3, 6), True, "torn-checkpoint"),
        (trial(range(7, 10)), (3, 6), False, "ended-early"),
    ],
)
def test_where_it_resumes(
    second: TrialRecord, saves: tuple[int, ...], torn: bool, kind: str
) -> None:
    found = compare_resumed(WHOLE, resumed(second, saves=saves, torn=torn)).difference
    assert found is not None
    assert found.kind == kind


# ---- two runs, and ranks


def test_two_equal_runs() -> None:
    assert compare_repeated(WHOLE, trial(range(1, 13))).difference is None


def test_runs_that_differ_from_the_start() -> None:
    other = trial(range(1, 13), change=change(at=1, weights_before=["x", "y"]))
    found = compare_repeated(WHOLE, other).difference
    assert found is not None
    assert (found.kind, found.step) == ("weights", 1)


def rank_kinds(change: Change) -> list[str]:
    return [found.kind for found in compare_ranks(trial(range(1, 13), change=change))]


def test_healthy_ranks() -> None:
    assert rank_kinds(lambda step, rank: None) == []


def test_ranks_with_the_same_samples() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step, 0).micro_batches

    assert rank_kinds(changed) == ["same-data"]


def test_ranks_that_drift_apart() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        if rank and step.step >= 5:
            step.weights = ["w0", step.weights[1]]

    found = compare_ranks(trial(range(1, 13), change=changed))
    assert [(one.kind, one.step, one.rank) for one in found] == [("replicas-differ", 5, 1)]
    assert "a.weight" in found[0].what


def test_buffers_of_each_rank() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.buffers = f"{rank}"

    assert rank_kinds(changed) == ["buffers-differ"]


def test_the_same_order_in_each_epoch() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        first = step_record((step.step - 1) % 4 + 1, rank).micro_batches[0]
        step.micro_batches[0].samples = first.samples

    assert rank_kinds(changed) == ["epoch-order"]


def test_a_rank_with_less_data() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        if rank and step.step % 4 == 0:
            step.micro_batches[0].samples = step.micro_batches[0].samples[:1]

    assert rank_kinds(changed) == ["uneven-batches"]


def test_workers_with_the_same_seed() -> None:
    record = trial(range(1, 13))
    for rank in record.ranks:
        rank.events.extend(
            EventRecord(kind="worker", step=0, random={"numpy": "same", "torch": str(worker)})
            for worker in range(2)
        )
    assert [found.kind for found in compare_ranks(record)] == ["worker-seeds"]


# ---- numbers of ranks


def variations(*, accumulation: bool) -> list[Variation]:
    return [
        Variation(
            name=f"{count} ranks",
            count=count,
            ranks=count,
            arguments=(),
            check="accumulation" if accumulation else f"{count}-ranks",
        )
        for count in (1, 2)
    ]


@pytest.mark.parametrize(
    ("factor", "accumulation", "kind"),
    [
        (1 + 1e-6, False, None),
        (4.0, False, "gradient-scale"),
        (0.25, False, "gradient-scale"),
        (4.0, True, "accumulation-scale"),
        (4.5, True, "accumulation-scale"),  # and the mean of means
        (1.1, False, "loss-average"),
    ],
)
def test_gradients_of_more_ranks(factor: float, accumulation: bool, kind: str | None) -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.replicated_square *= factor  # the square of a norm

    scaling = compare_scaled(
        WHOLE,
        trial(range(1, 13), change=changed),
        *variations(accumulation=accumulation),
    )
    assert (scaling.difference.kind if scaling.difference else None) == kind
    assert scaling.why_not == ""


def test_other_samples_cannot_be_compared() -> None:
    def changed(step: StepRecord, rank: int) -> None:
        step.micro_batches[0].samples = ["another", "sample"]

    scaling = compare_scaled(
        WHOLE,
        trial(range(1, 13), change=changed),
        *variations(accumulation=False),
    )
    assert scaling.difference is None
    assert scaling.why_not


# ---- where to stop


def test_stops_are_after_checkpoints_inside_and_at_the_end_of_epochs() -> None:
    whole = trial(range(1, 21), saves=(3, 6, 8, 9, 12, 15, 18))
    stops = {stop.name: stop.after_step for stop in stops_for(whole)}
    assert stops == {
        "killed": 16,
        "rank-killed": 13,
        "terminated": 4,
        "save-killed": 6,
    }


def test_no_stop_without_a_checkpoint() -> None:
    assert stops_for(trial(range(1, 13))) == []
