"""Each cause of a slow training is named first, with its gain, and a healthy one has nothing to mend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_profiles import HEALTHY, rank, ranks, step, trace
from torchmuster.finding import Status
from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import Cause, changes_to_try, find_causes, nothing_to_fix
from torchmuster.profile.facts import Change, Kind, RankFacts, Trial


def trial(kind: Kind, value: int, gain: float) -> Trial:
    factor = float(value) if kind == "batch" else 1.0
    return Trial(
        change=Change(kind=kind, value=value),
        before_s=(1.0,),
        after_s=(factor / gain,),
        samples_factor=factor,
    )


def first(facts: list[RankFacts], *trials: Trial) -> Cause:
    return find_causes(Profile(facts), trials)[0]


def wanted(facts: list[RankFacts]) -> list[str]:
    return [change.written for change in changes_to_try(Profile(facts))]


def test_a_healthy_training_has_nothing_to_mend() -> None:
    found = Profile(ranks(HEALTHY, HEALTHY))
    assert find_causes(found) == []
    told = nothing_to_fix(found)
    assert told.status is Status.OK
    assert told.what.startswith("nothing to fix: ")
    assert "of the step is compute" in told.what


def test_what_a_trial_did_not_confirm_is_not_advised() -> None:
    slow_link = {**HEALTHY, "waiting_s": 0.02, "backward_s": 0.058}
    facts = ranks(slow_link, slow_link)
    assert wanted(facts) == ["buckets=4", "bf16=1", "batch=8"]
    tried = (trial("buckets", 4, 1.02), trial("bf16", 1, 0.9), trial("batch", 8, 1.2))
    assert find_causes(Profile(facts), tried) == []


def test_a_trial_whose_runs_disagree_confirms_nothing() -> None:
    facts = ranks(HEALTHY, HEALTHY)
    change = Change(kind="bf16")
    noisy = Trial(change=change, before_s=(1.0, 1.6, 1.0, 1.6), after_s=(0.6, 1.2, 0.7, 1.3))
    assert noisy.gain > 1.3
    assert find_causes(Profile(facts), (noisy,)) == []


def test_a_starved_loader(snapshot: SnapshotAssertion) -> None:
    starved = {"data_s": 0.040}
    advice = first(ranks(starved, starved))
    assert advice.name == "starved-loader"
    assert advice.change == Change(kind="workers", value=2)
    # 106 ms less the 40 that two workers read beside the rest.
    assert advice.gain == pytest.approx(0.106 / 0.066)
    assert advice.known_by == "trace"
    assert advice.finding == snapshot
    assert "num_workers=2" in advice.finding.fix
    assert "data: {workers: 2}" in advice.finding.fix


def test_workers_that_do_not_keep_up_are_to_be_more(snapshot: SnapshotAssertion) -> None:
    starved = {"data_s": 0.066}  # one worker takes 132 ms for a batch, the rest of the step 66
    facts = ranks(starved, starved)
    facts = [_with_workers(one, 1) for one in facts]
    advice = first(facts)
    assert advice.change == Change(kind="workers", value=3)
    assert advice.gain == pytest.approx(2.0)
    assert advice.finding == snapshot


def _with_workers(facts: RankFacts, workers: int) -> RankFacts:
    assert facts.loader is not None
    return replace(facts, loader=replace(facts.loader, workers=workers))


def test_a_loader_that_more_workers_do_not_help_is_to_be_made_cheaper(
    snapshot: SnapshotAssertion,
) -> None:
    starved = {"data_s": 0.040}
    advice = first(ranks(starved, starved), trial("workers", 2, 0.97))
    assert advice.name == "starved-loader"
    assert advice.change is None
    assert "0.97x" in advice.finding.fix
    assert advice.finding == snapshot


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_rank_that_others_wait_for_is_named_with_what_it_does_longer(
    phase: str, snapshot: SnapshotAssertion
) -> None:
    slow = {f"{phase}_s": HEALTHY[f"{phase}_s"] + 0.030}
    facts = ranks(HEALTHY, slow, HEALTHY)
    backwards = {one.steps[0].backward_s for one in facts}
    assert phase != "backward" or max(backwards) - min(backwards) < 1e-9  # all look equally long
    advice = first(facts)
    assert advice.name == f"straggler-{phase}"
    assert advice.gain == pytest.approx(0.097 / 0.067)
    assert advice.change is None
    assert "rank 1" in advice.finding.what
    assert "on vm" in advice.finding.fix
    assert advice.finding == snapshot


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


def test_values_read_to_the_host(snapshot: SnapshotAssertion) -> None:
    reads = {"reads_s": 0.030, "reads": 12}
    advice = first(ranks(reads, reads))
    assert advice.name == "host-reads"
    assert advice.gain == pytest.approx(0.097 / 0.0673, rel=1e-3)
    assert advice.finding == snapshot
    assert ".item()" in advice.finding.why
    assert "log_every: 100" in advice.finding.fix


def test_saves_of_one_rank_hold_all_up(snapshot: SnapshotAssertion) -> None:
    saves = {"save_s": 0.050, "saves": 1}
    advice = first(ranks(saves, HEALTHY))
    assert advice.name == "many-saves"
    # One per cent of 67 ms is 0.67: a save of 50 ms every 75 steps.
    assert advice.change == Change(kind="saves", value=75)
    assert advice.gain == pytest.approx(0.117 / (0.067 + 0.05 / 75))
    assert "checkpoint: {every: 75}" in advice.finding.fix
    assert advice.finding == snapshot


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


def test_gradients_sent_when_nothing_is_left_to_compute(snapshot: SnapshotAssertion) -> None:
    late = {"waiting_s": 0.030, "backward_s": 0.068}
    facts = ranks(late, late)
    assert wanted(facts)[0] == "buckets=4"
    untried = first(facts)
    assert (untried.name, untried.gain) == ("no-overlap", None)
    assert untried.finding.status is Status.NOTE
    advice = first(facts, trial("buckets", 4, 1.3), trial("batch", 8, 1.6))
    assert (advice.name, advice.gain, advice.known_by) == ("no-overlap", 1.3, "trial")
    assert "bucket_cap_mb=4" in advice.finding.fix
    assert advice.finding == snapshot


def test_overlap_on_a_device_is_computed() -> None:
    late = {"waiting_s": 0.030, "backward_s": 0.068}
    advice = first(ranks(late, late, device="cuda:0", autocast="bfloat16"))
    assert advice.name == "no-overlap"
    # Six messages: the last one's 5 ms stay.
    assert advice.gain == pytest.approx(0.093 / (0.093 - 0.025))


def test_a_network_too_slow_to_hide_is_not_blamed_on_messages() -> None:
    late = {"waiting_s": 0.300, "backward_s": 0.338}
    causes = [one.name for one in find_causes(Profile(ranks(late, late)))]
    assert "no-overlap" not in causes


def test_more_threads_than_cores(snapshot: SnapshotAssertion) -> None:
    facts = ranks(HEALTHY, HEALTHY, threads=16)
    assert wanted(facts)[0] == "threads=1"
    advice = first(facts, trial("threads", 1, 2.5), trial("batch", 8, 3.0))
    assert (advice.name, advice.gain) == ("too-many-threads", 2.5)
    assert advice.finding == snapshot
    assert "torch.set_num_threads(1)" in advice.finding.fix


def test_full_precision() -> None:
    facts = ranks(HEALTHY, HEALTHY)
    assert wanted(facts) == ["bf16=1"]
    advice = first(facts, trial("bf16", 1, 1.8))
    assert (advice.name, advice.known_by) == ("full-precision", "trial")
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in advice.finding.fix
    assert wanted(ranks(HEALTHY, HEALTHY, autocast="bfloat16")) == []


TINY: Mapping[str, float] = {
    "forward_s": 0.001,
    "backward_s": 0.011,
    "waiting_s": 0.009,
    "optimizer_s": 0.003,
}


def test_a_tiny_batch() -> None:
    facts = ranks(TINY, TINY)
    assert "batch=8" in wanted(facts)
    advice = first(facts, trial("batch", 8, 5.0))
    assert (advice.name, advice.gain, advice.known_by) == ("tiny-batch", 5.0, "trial")
    assert "512 samples would give 5.0x" in advice.finding.what
    computed = first(facts)
    assert computed.name == "tiny-batch"
    # 17 ms, of which 12 for sending and the optimizer stay the same.
    assert computed.gain == pytest.approx(8 * 17 / (12 + 8 * 5))
    assert "at least" in computed.finding.what


def test_a_device_that_idles_between_small_kernels(snapshot: SnapshotAssertion) -> None:
    small = trace(shares={"compute": 0.03, "idle": 0.07}, calls=900.0, median_s=5e-6)
    found = Profile(ranks(HEALTHY, device="cuda:0", autocast="bfloat16", trace=small))
    assert "batch=8" in [change.written for change in changes_to_try(found)]
    advice = find_causes(found)[0]
    assert (advice.name, advice.gain) == ("tiny-batch", None)
    assert advice.finding == snapshot


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
    assert changes_to_try(found) == []
