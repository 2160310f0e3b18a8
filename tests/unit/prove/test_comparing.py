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


def kind_after(change: Change, start: int = 6) -> tuple[str, int]:
    found = compare_resumed(WHOLE, resumed(trial(range(start + 1, 13), change=change))).difference
    assert found is not None
    return found.kind, found.step


def test_a_run_that_resumes_exactly_has_no_difference() -> None:
    found = compare_resumed(WHOLE, resumed(trial(range(7, 13))))
    assert found.difference is None
    assert found.rounding == 0


def replace(field: str, value: object, *, at: int = 7) -> Change:
    def change(step: StepRecord, rank: int) -> None:
        if step.step >= at:
            setattr(step, field, value)

    return change


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("state_before", {}, "optimizer-state"),
        ("buffers", "others", "buffers"),
        ("scale", 65536.0, "loss-scale"),
        ("learning_rates", [0.5], "learning-rate"),
        ("settings", '{"weight_decay": 0.1}', "optimizer-state"),
        ("copies", ["ema-of-weights"], "weight-copy"),
        ("state", {"exp_avg": "0", "step": "1"}, "optimizer-state"),
        ("weights", ["x", "y"], "weights"),
    ],
)
def test_what_is_not_restored_is_named(field: str, value: object, kind: str) -> None:
    assert kind_after(replace(field, value)) == (kind, 7)


def test_a_later_difference_has_its_step() -> None:
    assert kind_after(replace("learning_rates", [0.5], at=9)) == ("learning-rate", 9)


def other_result(step: StepRecord, rank: int) -> None:
    step.gradients, step.replicated_square = "others", 5.0


def test_dropout_with_other_random_numbers_is_rng() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.rng = {**step.rng, "torch": f"other-{step.step}"}
        other_result(step, rank)

    assert kind_after(change) == ("rng", 7)


def test_a_generator_that_no_step_draws_from_is_not_blamed() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.rng = {**step.rng, "python": "another"}
        other_result(step, rank)

    assert kind_after(change) == ("computation", 7)


def test_other_random_states_without_an_effect_are_no_difference() -> None:
    second = trial(range(7, 13), change=replace("rng", {"torch": "another"}))
    assert compare_resumed(WHOLE, resumed(second)).difference is None


def test_another_order_of_additions_is_rounding() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.gradients, step.weights = f"rounded-{step.step}", ["rounded", "rounded"]
        step.state = {"exp_avg": "rounded", "step": str(step.step)}
        step.replicated_square *= 1 + 1e-7

    found = compare_resumed(WHOLE, resumed(trial(range(7, 13), change=change)))
    assert found.difference is None
    assert 0 < found.rounding < 1e-6


def test_a_lost_optimizer_is_no_rounding() -> None:
    def change(step: StepRecord, rank: int) -> None:
        if step.state_before is not None:
            step.state_before = {}
        step.weights = ["nearly", "equal"]

    assert kind_after(change) == ("optimizer-state", 7)


def test_data_that_is_read_again() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step - 2, rank).micro_batches

    found = compare_resumed(WHOLE, resumed(trial(range(7, 13), change=change))).difference
    assert found is not None
    assert (found.kind, found.step, found.line) == ("data-order", 7, "train.py:7")
    assert "the last 2 batches are repeated" in found.what


def test_other_data_of_a_rank_explain_the_result_on_another() -> None:
    def change(step: StepRecord, rank: int) -> None:
        other_result(step, rank)
        if rank == 1:
            step.micro_batches[0].inputs = "others"

    assert kind_after(change) == ("data-order", 7)


def test_skipped_data() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step + 1, rank).micro_batches

    found = compare_resumed(WHOLE, resumed(trial(range(7, 12), change=change))).difference
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


def test_weights_of_no_step() -> None:
    second = trial(range(7, 13), change=replace("weights_before", ["half", "precision"]))
    found = compare_resumed(WHOLE, resumed(second)).difference
    assert found is not None
    assert found.kind == "weights"


# ---- two runs, and ranks


def test_two_equal_runs() -> None:
    assert compare_repeated(WHOLE, trial(range(1, 13))).difference is None


def test_runs_that_differ_from_the_start() -> None:
    other = trial(range(1, 13), change=replace("weights_before", ["x", "y"], at=1))
    found = compare_repeated(WHOLE, other).difference
    assert found is not None
    assert (found.kind, found.step) == ("weights", 1)


def rank_kinds(change: Change) -> list[str]:
    return [found.kind for found in compare_ranks(trial(range(1, 13), change=change))]


def test_healthy_ranks() -> None:
    assert rank_kinds(lambda step, rank: None) == []


def test_ranks_with_the_same_samples() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.micro_batches = step_record(step.step, 0).micro_batches

    assert rank_kinds(change) == ["same-data"]


def test_ranks_that_drift_apart() -> None:
    def change(step: StepRecord, rank: int) -> None:
        if rank and step.step >= 5:
            step.weights = ["w0", step.weights[1]]

    found = compare_ranks(trial(range(1, 13), change=change))
    assert [(one.kind, one.step, one.rank) for one in found] == [("replicas-differ", 5, 1)]
    assert "a.weight" in found[0].what


def test_buffers_of_each_rank() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.buffers = f"{rank}"

    assert rank_kinds(change) == ["buffers-differ"]


def test_the_same_order_in_each_epoch() -> None:
    def change(step: StepRecord, rank: int) -> None:
        first = step_record((step.step - 1) % 4 + 1, rank).micro_batches[0]
        step.micro_batches[0].samples = first.samples

    assert rank_kinds(change) == ["epoch-order"]


def test_a_rank_with_less_data() -> None:
    def change(step: StepRecord, rank: int) -> None:
        if rank and step.step % 4 == 0:
            step.micro_batches[0].samples = step.micro_batches[0].samples[:1]

    assert rank_kinds(change) == ["uneven-batches"]


def test_workers_with_the_same_seed() -> None:
    record = trial(range(1, 13))
    for rank in record.ranks:
        rank.events.extend(
            EventRecord(
                kind="worker",
                step=0,
                values={
                    "worker": str(worker),
                    "loader": "0",
                    "numpy": "same",
                    "torch": str(worker),
                },
            )
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
    def change(step: StepRecord, rank: int) -> None:
        step.replicated_square *= factor  # the square of a norm

    scaling = compare_scaled(
        WHOLE,
        trial(range(1, 13), change=change),
        *variations(accumulation=accumulation),
    )
    assert (scaling.difference.kind if scaling.difference else None) == kind
    assert scaling.why_not == ""


def test_other_samples_cannot_be_compared() -> None:
    def change(step: StepRecord, rank: int) -> None:
        step.micro_batches[0].samples = ["another", "sample"]

    scaling = compare_scaled(
        WHOLE,
        trial(range(1, 13), change=change),
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
