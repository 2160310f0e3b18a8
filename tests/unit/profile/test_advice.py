"""Each cause of a slow training is named first, with its gain, and a healthy one has nothing to mend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from made_up_profiles import HEALTHY, rank, ranks, step, trace
from torchmuster.finding import Status
from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import Cause, find_causes, findings_of, with_trials
from torchmuster.profile.facts import Change, Loader, RankFacts


def first(facts: list[RankFacts]) -> Cause:
    return find_causes(Profile(facts))[0]


def verified(facts: list[RankFacts], gains: Mapping[Change, float]) -> list[Cause]:
    return with_trials(find_causes(Profile(facts)), gains)


def accused(causes: list[Cause]) -> list[str]:
    return [cause.name for cause in causes if cause.is_accused]


TINY: Mapping[str, float] = {
    "forward_s": 0.001,
    "backward_s": 0.011,
    "waiting_s": 0.009,
    "optimizer_s": 0.003,
}
LATE = {"waiting_s": 0.030, "backward_s": 0.068}
# The facts, the first cause, its computed gain, its change, and what the fix says.
CAUSES: dict[str, tuple[list[RankFacts], str, float | None, Change | None, str]] = {
    "all wait for data": (
        ranks({"data_s": 0.040}, {"data_s": 0.040}),
        "starved-loader",
        0.106 / 0.066,
        Change(kind="workers", value=2),
        "data: {workers: 2}",
    ),
    "values are read to the host": (
        ranks(*[{"reads_s": 0.030, "reads": 12}] * 2),
        "host-reads",
        0.097 / 0.0673,
        None,
        "log_every: 100",
    ),
    # One per cent of 67 ms is 0.67: a save of 50 ms every 75 steps.
    "one rank saves in every step": (
        ranks({"save_s": 0.050, "saves": 1}, HEALTHY),
        "many-saves",
        0.117 / (0.067 + 0.05 / 75),
        Change(kind="saves", value=75),
        "checkpoint: {every: 75}",
    ),
    # The last of six messages cannot overlap.
    "gradients are sent at the end, on a device": (
        ranks(LATE, LATE, device="cuda:0", autocast="bfloat16"),
        "no-overlap",
        0.093 / (0.093 - 0.025),
        Change(kind="buckets", value=4),
        "bucket_cap_mb=4",
    ),
    "more threads than cores": (
        ranks(HEALTHY, HEALTHY, threads=16),
        "too-many-threads",
        None,
        Change(kind="threads", value=1),
        "torch.set_num_threads(1)",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_first_with_its_gain_and_fix(name: str) -> None:
    facts, cause, gain, change, fix = CAUSES[name]
    advice = first(facts)
    assert (advice.name, advice.change) == (cause, change)
    assert advice.gain == (None if gain is None else pytest.approx(gain, rel=1e-3))
    assert fix in advice.finding.fix
    assert advice.finding.status is Status.WARNING


def test_a_healthy_training_has_nothing_to_mend() -> None:
    profile = Profile(ranks(HEALTHY, HEALTHY))
    causes = find_causes(profile)
    assert [cause.name for cause in causes] == ["full-precision"]  # only to try
    told, note = findings_of(profile, causes)
    assert (told.status, note.status) == (Status.OK, Status.NOTE)
    assert told.what.startswith("nothing to fix: ")
    assert "of the step is compute" in told.what


# Causes that only a trial can tell: the facts, the change, and a gain that is enough.
TRIED = {
    "no-overlap": (ranks(LATE, LATE), Change(kind="buckets", value=4), 1.3),
    "full-precision": (ranks(HEALTHY, HEALTHY), Change(kind="bf16"), 1.8),
    "tiny-batch": (ranks(TINY, TINY), Change(kind="batch", value=8), 5.0),
}


@pytest.mark.parametrize("name", TRIED)
def test_what_only_a_trial_can_tell_is_a_note_until_it_is_tried(name: str) -> None:
    facts, change, gain = TRIED[name]
    notes = {cause.name: cause.finding for cause in find_causes(Profile(facts))}
    assert notes[name].status is Status.NOTE
    assert "muster profile --verify" in notes[name].what
    advice = verified(facts, {change: gain})[0]
    assert (advice.name, advice.tried) == (name, gain)
    assert advice.finding.status is Status.WARNING
    assert f"{change} gave {gain:.2f}x" in advice.finding.what
    assert name not in accused(verified(facts, {change: 1.05}))


def test_a_computed_gain_that_a_trial_does_not_confirm_is_a_note() -> None:
    starved = ranks({"data_s": 0.040}, {"data_s": 0.040})
    causes = verified(starved, {Change(kind="workers", value=2): 0.97})
    assert accused(causes) == []
    finding = next(cause.finding for cause in causes if cause.name == "starved-loader")
    assert "0.97x" in finding.what
    assert "decode and resize the data once" in finding.fix


def test_workers_that_do_not_keep_up_are_to_be_more() -> None:
    starved = {"data_s": 0.066}  # one worker takes 132 ms for a batch, the rest of the step 66
    loader = Loader(workers=1, samples_per_batch=64, dataset="Samples")
    advice = first(ranks(starved, starved, loader=loader))
    assert advice.change == Change(kind="workers", value=3)
    assert advice.gain == pytest.approx(2.0)


def test_a_network_too_slow_to_hide_is_not_blamed_on_messages() -> None:
    late = {"waiting_s": 0.300, "backward_s": 0.338}
    assert "no-overlap" not in [cause.name for cause in find_causes(Profile(ranks(late, late)))]


def test_a_device_that_idles_may_need_a_larger_batch() -> None:
    idle = trace(shares={"compute": 0.03, "idle": 0.07})
    found = find_causes(Profile(ranks(HEALTHY, device="cuda:0", autocast="bfloat16", trace=idle)))
    assert [cause.name for cause in found] == ["tiny-batch"]
    assert "70%" in found[0].evidence


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_rank_that_others_wait_for_is_named_with_what_it_does_longer(
    phase: str,
) -> None:
    slow = {f"{phase}_s": HEALTHY[f"{phase}_s"] + 0.030}
    facts = ranks(HEALTHY, slow, HEALTHY)
    backwards = {one.steps[0].seconds["backward"] for one in facts}
    assert phase != "backward" or max(backwards) - min(backwards) < 1e-9  # all look equally long
    advice = first(facts)
    assert advice.name == f"straggler-{phase}"
    assert advice.gain == pytest.approx(0.097 / 0.067)
    assert advice.change is None
    assert "rank 1" in advice.finding.what
    assert "on vm" in advice.finding.fix


def test_ranks_that_are_late_in_turns_are_no_stragglers() -> None:
    even, odd = ranks(HEALTHY, {"forward_s": 0.05}), ranks({"forward_s": 0.05}, HEALTHY)
    mixed = [
        rank(at, steps=[one.steps[n] if n % 2 else other.steps[n] for n in range(10)])
        for at, (one, other) in enumerate(zip(even, odd, strict=True))
    ]
    assert "straggler" not in " ".join(one.name for one in find_causes(Profile(mixed)))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_load_of_other_programs_does_not_hide_a_straggler(phase: str) -> None:
    slow = {f"{phase}_s": HEALTHY[f"{phase}_s"] + 0.030}
    quiet, loaded = ranks(HEALTHY, slow), ranks({"forward_s": 0.13}, slow)
    disturbed = [
        rank(at, steps=[other.steps[n] if n % 5 < 2 else one.steps[n] for n in range(10)])
        for at, (one, other) in enumerate(zip(quiet, loaded, strict=True))
    ]
    advice = first(disturbed)
    assert advice.name == f"straggler-{phase}"
    assert "rank 1" in advice.finding.what


def test_a_save_every_fifth_step_is_counted_by_the_steps_between() -> None:
    def steps(saving: bool) -> list[Any]:
        told: list[dict[str, Any]] = [
            {"save_s": 0.2, "saves": 1} if saving and number % 5 == 0 else {}
            for number in range(20)
        ]
        return [step(3 + at, **one) for at, one in enumerate(told)]

    advice = first([rank(0, ranks=1, steps=steps(True))])
    assert advice.name == "many-saves"
    assert advice.gain is not None
    assert 1.5 < advice.gain < (0.067 + 0.2 / 5) / 0.067


def test_gradients_sent_for_every_micro_batch() -> None:
    late = {"waiting_s": 0.030, "backward_s": 0.068, "micro_batches": 4}
    facts = ranks(late, late, bucket_bytes=4 * 2**20, trace=trace(messages=24.0))
    causes = {cause.name: cause for cause in find_causes(Profile(facts))}
    assert "no_sync" in causes["sent-each-micro-batch"].finding.fix
    assert causes["sent-each-micro-batch"].gain == pytest.approx(0.093 / (0.093 - 0.0225))
    once = [replace(facts, trace=trace(messages=6.0)) for facts in facts]
    assert "sent-each-micro-batch" not in {cause.name for cause in find_causes(Profile(once))}


def test_a_step_that_something_else_held_up_is_not_judged() -> None:
    held_up = [step(at) for at in range(3, 12)] + [step(12, forward_s=0.9)]
    found = Profile([rank(0, ranks=1, steps=held_up)])
    assert len(found.steps) == 9
    assert found.step_s == pytest.approx(0.067)


def test_steps_with_the_profiler_do_not_count_where_there_are_others() -> None:
    steps = [step(at) for at in range(3, 12)] + [step(12, profiled=True, forward_s=0.03)]
    found = Profile([rank(0, ranks=1, steps=steps)])
    assert len(found.steps) == 9


def test_the_gain_of_one_rank_ends_where_another_is_the_slowest() -> None:
    slow = Profile(ranks({"forward_s": 0.06}, {"forward_s": 0.04}, HEALTHY)).straggler
    assert slow is not None
    assert slow.rank == 0
    assert slow.gain == pytest.approx(0.107 / 0.087)


def test_a_device_that_others_wait_for_has_the_shortest_collectives() -> None:
    def on_device(sent_s: float, compute_s: float) -> Any:
        shares = {"compute": compute_s, "exposed": sent_s}
        return trace(sent_s=(sent_s,) * 3, shares=shares)

    facts = ranks(HEALTHY, HEALTHY, HEALTHY, device="cuda:0", autocast="bfloat16")
    early, late = on_device(0.030, 0.070), on_device(0.002, 0.098)
    traces = zip(facts, (early, early, late), strict=True)
    found = Profile([replace(rank, trace=traced) for rank, traced in traces])
    advice = find_causes(found)[0]
    assert advice.name == "straggler-compute"
    assert advice.finding.what.startswith("straggler: the other ranks wait for rank 2")
    assert advice.gain == pytest.approx(0.1 / 0.072)


def test_ranks_without_steps_are_analysed_to_nothing() -> None:
    found = Profile([])
    assert find_causes(found) == []
