"""Which way to train is chosen, why, and what would change that, over models that are simple sums."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import RATES, MadeUpModel, hardware, question
from torchmuster.errors import ExitCode, Impossible
from torchmuster.plan.answer import Answer, PassedOver, candidate_name
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.planning import make_plan
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.candidates import (
    Explored,
    Traces,
    forecast_candidate,
    scout,
    search_order,
)
from torchmuster.plan.search.decide import choose_candidate, describe_passed_over
from torchmuster.plan.search.pruning import SAME_RATE
from torchmuster.plan.search.refusal import nearest_of, refusal
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.forecast import StepTime
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB


def answer_of(model: MadeUpModel, asked: PlanRequest) -> Answer:
    return make_plan(asked, model.look, rates=RATES, simulate=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> MadeUpModel:
    return MadeUpModel(parameters=1_000_000_000).stand_in(monkeypatch)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> MadeUpModel:
    return MadeUpModel().stand_in(monkeypatch)


def test_a_model_that_fits_on_every_card_is_copied(
    small: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    answer = answer_of(small, question())
    assert answer.chosen.value.candidate.strategy == "ddp"
    assert answer.chosen.reason == snapshot
    assert {one.candidate.strategy for one in small.traced} == {"ddp", "fsdp"}
    assert len([one for one in small.traced if one.candidate.strategy == "fsdp"]) == 2


def test_what_does_not_fit_on_a_card_is_sharded_and_the_reason_says_so(
    large: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    answer = answer_of(large, question())
    assert answer.chosen.value.candidate.strategy == "fsdp"
    assert answer.chosen.reason == snapshot
    assert "104 GiB" in answer.would_change[0]
    assert answer.would_change[0] == snapshot
    assert all(one.candidate.strategy == "fsdp" for one in large.traced)
    assert not any(one.candidate.cpu_offload for one in large.traced), "it fits without"


def test_the_runner_up_says_by_how_much_it_is_slower(
    large: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    asked = question()
    explored = Explored(traces=Traces(asked, large.look))
    kept = Candidate(
        strategy="fsdp",
        layout=ShardLayout(copies=1, shards=8),
        precision="bf16",
        micro_batch_size=8,
    )
    for one in (kept, dataclasses.replace(kept, recompute="full")):
        explored.forecasts.append(forecast_candidate(one, explored.traces, asked, rates=RATES))
    _, second = choose_candidate(explored, asked)
    assert second is not None
    assert second.value.candidate.recompute == "full"
    assert "25 %" in second.reason
    assert second.reason == snapshot


def at_rates(model: MadeUpModel, rates: dict[Candidate, float]) -> Explored:
    """Return forecasts that fit, with these samples a second."""
    asked = question(hardware(machines=2))
    explored = Explored(traces=Traces(asked, model.look))
    for candidate, rate in rates.items():
        found = forecast_candidate(candidate, explored.traces, asked, rates=RATES)
        assert found.fits
        explored.forecasts.append(dataclasses.replace(found, samples_per_s=rate))
    return explored


SHARDED = Candidate(strategy="fsdp", layout=ShardLayout(copies=1, shards=16), precision="bf16")
HYBRID = dataclasses.replace(SHARDED, layout=ShardLayout(copies=2, shards=8))
COPIES = Candidate(strategy="ddp", layout=ShardLayout(copies=16, shards=1), precision="bf16")


@pytest.mark.parametrize("rate", [100.0 * 1.003**power for power in range(20)])
def test_ways_that_are_nearly_as_fast_as_the_fastest_are_equal(
    small: MadeUpModel, rate: float
) -> None:
    explored = at_rates(small, {COPIES: rate, SHARDED: rate * 1.04, HYBRID: rate * 1.0401})
    chosen, second = choose_candidate(explored, question())
    assert chosen.value.candidate == COPIES
    assert second is not None
    assert second.value.candidate == SHARDED
    assert "%" not in second.reason, "it is no slower"


def test_what_is_simpler_and_slower_than_the_fastest_is_said_so(
    small: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    explored = at_rates(small, {COPIES: 100.0, SHARDED: 100.1, HYBRID: 105.01})
    chosen, second = choose_candidate(explored, question())
    assert chosen.value.candidate == SHARDED
    assert "5 %" in chosen.reason
    assert chosen.reason == snapshot
    assert second is not None
    assert second.value.candidate == HYBRID


def test_a_hardly_faster_micro_batch_is_not_worth_its_memory(small: MadeUpModel) -> None:
    sizes = {1: 100.0, 2: 104.0, 4: 104.9, 8: 105.0}
    ways = {dataclasses.replace(COPIES, micro_batch_size=n): rate for n, rate in sizes.items()}
    assert (
        choose_candidate(at_rates(small, ways), question())[0].value.candidate.micro_batch_size == 2
    )


def test_one_card_has_a_way_of_its_own(small: MadeUpModel) -> None:
    answer = answer_of(small, question(hardware(cards=1)))
    assert candidate_name(answer.chosen.value.candidate) == "single"


def test_a_global_batch_is_divided_among_ranks_and_micro_batches(large: MadeUpModel) -> None:
    best = answer_of(large, question(global_batch_size=128)).chosen.value.candidate
    assert (best.micro_batch_size, best.accumulation) == (8, 2), "fewer portions are simpler"
    assert best.global_batch_size == 128


def test_samples_that_do_not_divide_evenly_are_told(
    large: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    answer = answer_of(large, question(global_batch_size=100))
    (found,) = [one for one in answer.findings if one.name == "uneven-portions"]
    assert "104" in found.fix
    assert found == snapshot
    rate = answer.chosen.value.samples_per_s
    assert rate is not None
    assert rate == pytest.approx(100 / 104 * answer.chosen.value.time.samples_per_s)  # type: ignore[union-attr]


def test_activations_are_computed_again_only_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MadeUpModel(sample_gib=90.0, sample_s=1.0).stand_in(monkeypatch)
    best = answer_of(model, question()).chosen.value.candidate
    assert best.recompute == "selective"
    model = MadeUpModel(sample_gib=300.0, sample_s=1.0).stand_in(monkeypatch)
    best = answer_of(model, question()).chosen.value.candidate
    assert best.recompute == "full"


def test_offload_is_for_what_fits_in_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MadeUpModel(parameters=60_000_000_000).stand_in(monkeypatch)
    answer = answer_of(model, question())
    assert answer.chosen.reason.startswith("fsdp + offload over 8 GPUs")
    assert answer.runner_up is None or "offload" in answer.runner_up.reason


def test_many_machines_share_copies(large: MadeUpModel) -> None:
    answer = answer_of(large, question(hardware(machines=16)))
    assert answer.chosen.reason.startswith("hybrid 16 x 8 over 128 GPUs")


def test_a_way_over_some_of_the_cards_is_not_taken_for_that_over_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MadeUpModel(parameters=60_000_000_000).stand_in(monkeypatch)
    answer = answer_of(model, question(hardware(machines=16), sharding="full_shard"))
    assert answer.chosen.reason.startswith("fsdp over 128 GPUs")
    passed = {one.name for one in answer.passed_over}
    assert "fsdp over 8 GPUs" in passed
    assert "fsdp" not in passed


def test_a_global_batch_that_nobody_asked_for_is_told(
    small: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    answer = answer_of(small, question())
    samples = answer.chosen.value.candidate.global_batch_size
    (told,) = [one for one in answer.findings if one.name == "batch-left-open"]
    assert f"{samples:,} samples" in told.what
    assert "--set train.global_batch_size=N" in told.fix
    assert told == snapshot
    asked = answer_of(small, question(global_batch_size=64))
    assert not [one for one in asked.findings if one.name == "batch-left-open"]


def test_what_a_larger_step_would_gain_is_said_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = MadeUpModel(sample_gib=1.0, sample_s=0.002).stand_in(monkeypatch)
    answer = answer_of(model, question())
    best = answer.chosen.value.candidate
    assert best.micro_batch_size == 8
    (said,) = [one for one in answer.would_change if "global batch" in one]
    assert "256" in said
    assert "206 %" in said
    assert said == snapshot
    fixed = answer_of(model, question(global_batch_size=64))
    assert not [one for one in fixed.would_change if "global batch" in one]
    slow = MadeUpModel(sample_gib=1.0, sample_s=1.0).stand_in(monkeypatch)
    answer = answer_of(slow, question())
    assert not [one for one in answer.would_change if "global batch" in one]


def test_more_shards_than_rows_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = MadeUpModel(parameters=400_000_000_000).stand_in(monkeypatch)
    answer = answer_of(model, question(hardware(machines=2048)))
    passed = {one.name: one.why for one in answer.passed_over}
    assert "2.00" in passed["fsdp over 16,384 shards"]
    assert passed["fsdp over 16,384 shards"] == snapshot
    assert answer.chosen.value.candidate.layout.shards < 16384


def test_a_faster_way_that_lacks_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = MadeUpModel(sample_gib=35.0).stand_in(monkeypatch)
    slow = dataclasses.replace(
        hardware(), within=dataclasses.replace(hardware().within, bytes_s=5e8)
    )
    answer = answer_of(model, question(slow, recompute="none", strategy="fsdp"))
    assert answer.would_change == snapshot


def test_the_refusal_names_what_is_missing_and_how_many_cards_would_do(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = MadeUpModel(parameters=70_000_000_000).stand_in(monkeypatch)
    with pytest.raises(Impossible) as refused:
        answer_of(model, question(cpu_offload=False))
    error = refused.value
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert "16 GPUs (2 machines)" in error.fix
    assert error == snapshot


def test_of_ways_that_miss_by_the_same_the_one_over_most_cards_is_named(
    small: MadeUpModel,
) -> None:
    few = dataclasses.replace(SHARDED, layout=ShardLayout(copies=1, shards=8), cpu_offload=True)
    many = dataclasses.replace(few, layout=ShardLayout(copies=2, shards=8))
    explored = at_rates(small, {few: 1.0, many: 1.0})
    assert nearest_of(explored).candidate == many  # type: ignore[union-attr]
    less = dataclasses.replace(explored.forecasts[0].memory, high_bytes=1)
    explored.forecasts[0] = dataclasses.replace(explored.forecasts[0], memory=less)
    assert nearest_of(explored).candidate == few  # type: ignore[union-attr]


def test_a_refusal_without_a_forecast_names_what_needs_least(
    small: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    asked = question()
    explored = Explored(traces=Traces(asked, small.look))

    def why() -> str:
        return refusal(asked, explored, small.look, rates=RATES).why

    assert why() == snapshot
    explored.passed_over = [PassedOver(name="fsdp", why="parameters have fewer rows")]
    assert why() == "fsdp: parameters have fewer rows"
    explored.passed_over += [
        PassedOver(name="ddp", why="at least 9 GiB", needs_bytes=9),
        PassedOver(name="hybrid 2 x 8", why="at least 5 GiB", needs_bytes=5),
    ]
    assert why() == "hybrid 2 x 8: at least 5 GiB"


def test_the_refusal_tries_what_was_fixed(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = MadeUpModel().stand_in(monkeypatch)
    with pytest.raises(Impossible) as refused:
        answer_of(model, question(micro_batch_size=64, recompute="none"))
    lines = refused.value.fix.splitlines()
    assert "train.activation_checkpointing" in lines[0]
    assert "train.micro_batch_size" in lines[1]
    assert refused.value == snapshot


def test_a_model_that_cannot_be_traced_nor_computed_is_refused_by_the_trace(
    small: MadeUpModel,
) -> None:
    def look(requests: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
        return [
            TraceRefused(what="it reads values", why="item()", fix="leave it out") for _ in requests
        ]

    with pytest.raises(Impossible, match="it reads values") as refused:
        make_plan(question(), look, rates=RATES)
    assert refused.value.fix == "leave it out"


def test_a_model_that_cannot_be_traced_is_estimated_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    work = Work(model_name_or_path=".", folder=str(tmp_path), sequence_length=8192)

    def look(requests: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
        return [TraceRefused(what="it reads values", fix="leave it out") for _ in requests]

    answer = make_plan(question(work=work), look, rates=RATES)
    best = answer.chosen.value
    assert best.candidate.strategy == "fsdp"
    assert best.time is None
    assert "tokens/s" not in answer.chosen.reason
    assert best.memory.high_bytes > 1.15 * best.memory.total_bytes
    (warning,) = [one for one in answer.findings if one.name == "not-traced"]
    assert warning.why == "it reads values"
    assert warning == snapshot


def test_the_allocator_decides_about_what_is_preferred(
    large: MadeUpModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(
        records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        needed = large.memory(records, candidate, hardware=hardware)
        if not records[0].request.keep_log:
            return needed
        # Fragments make the preferred one too large.
        reserved = needed.tensor_bytes + 30 * GiB
        return dataclasses.replace(
            needed, reserved_bytes=reserved, total_bytes=reserved, high_bytes=reserved
        )

    assert answer_of(large, question()).chosen.value.candidate.micro_batch_size == 8
    monkeypatch.setattr(memory, "predict_memory", simulated)
    answer = make_plan(question(), large.look, rates=RATES)
    assert answer.chosen.value.candidate.micro_batch_size == 4
    assert answer.chosen.value.memory.reserved_bytes is not None


def test_what_is_chosen_was_simulated_however_many_were_before(
    large: MadeUpModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    def simulated(
        records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        needed = large.memory(records, candidate, hardware=hardware)
        if not records[0].request.keep_log:
            return needed
        looked_at.append(candidate.micro_batch_size)
        reserved = needed.tensor_bytes + (0 if candidate.micro_batch_size == 1 else 100 * GiB)
        return dataclasses.replace(
            needed, reserved_bytes=reserved, total_bytes=reserved, high_bytes=reserved
        )

    monkeypatch.setattr(memory, "predict_memory", simulated)
    asked = question(strategy="fsdp", sharding="full_shard", recompute="none", cpu_offload=False)
    answer = make_plan(asked, large.look, rates=RATES)
    assert answer.chosen.value.candidate.micro_batch_size == 1
    assert answer.chosen.value.memory.reserved_bytes is not None
    assert looked_at == [8, 4, 2, 1]


@pytest.mark.parametrize("parameters", [1e9, 7e9, 30e9, 70e9])
def test_more_memory_never_makes_a_plan_slower(
    monkeypatch: pytest.MonkeyPatch, parameters: float
) -> None:
    model = MadeUpModel(parameters=int(parameters)).stand_in(monkeypatch)
    before = 0.0
    for memory_gib in (8, 16, 24, 40, 48, 64, 80, 96, 141, 192, 288, 1000):
        try:
            answer = answer_of(model, question(hardware(memory_gib=memory_gib)))
        except Impossible:
            assert before == 0.0, f"{memory_gib} GiB do not fit any more"
            continue
        rate = answer.chosen.value.samples_per_s or 0.0
        assert rate * SAME_RATE >= before
        before = max(rate, before)


@pytest.mark.parametrize("parameters", [1e9, 7e9, 70e9, 400e9])
def test_more_cards_never_make_it_fit_no_longer(
    monkeypatch: pytest.MonkeyPatch, parameters: float
) -> None:
    model = MadeUpModel(parameters=int(parameters)).stand_in(monkeypatch)
    fitted = False
    for machines, cards in [(1, 1), (1, 2), (1, 4), (1, 8), *((2**n, 8) for n in range(1, 12))]:
        try:
            answer_of(model, question(hardware(machines=machines, cards=cards)))
            fitted = True
        except Impossible:
            assert not fitted, f"{machines} x {cards}"
    assert fitted


def test_what_outgrows_a_card_by_far_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MadeUpModel(sample_gib=60.0).stand_in(monkeypatch)
    answer_of(model, question(strategy="fsdp", recompute="none"))
    assert {one.candidate.micro_batch_size for one in model.traced} == {1}
    model = MadeUpModel(sample_gib=35.0).stand_in(monkeypatch)
    answer_of(model, question(strategy="fsdp", recompute="none"))
    assert {one.candidate.micro_batch_size for one in model.traced} == {1, 2}
    model = MadeUpModel(sample_gib=12.0).stand_in(monkeypatch)
    answer_of(model, question(strategy="fsdp", recompute="none"))
    assert {one.candidate.micro_batch_size for one in model.traced} == {1, 2, 3}


def test_what_is_left_with_less_memory_needs_less(
    large: MadeUpModel, snapshot: SnapshotAssertion
) -> None:
    answer = answer_of(large, question())
    best = answer.chosen.value.memory.high_bytes
    (less,) = [one for one in answer.would_change if "64.1 GiB" in one]
    assert less == snapshot
    assert best == pytest.approx(64.1 * GiB, rel=0.01)


def test_reasons_that_are_alike_share_a_line_with_the_least_amount(
    snapshot: SnapshotAssertion,
) -> None:
    found = [
        PassedOver(
            name=f"hybrid {8 // n} x {n}", why=f"at least {800 // n}.0 GiB", needs_bytes=800 // n
        )
        for n in (1, 2, 4)
    ]
    found.append(PassedOver(name="fsdp", why="at least 300.0 GiB", needs_bytes=300))
    (line,) = describe_passed_over(found)
    assert line.endswith(": at least 200.0 GiB")
    assert line == snapshot
    found = [
        PassedOver(name=f"hybrid 2 x 8{rest}", why="too large")
        for rest in ("", " with recompute none", " + offload with recompute full")
    ]
    (line,) = describe_passed_over(found)
    assert line == snapshot
    many = [PassedOver(name="fsdp", why=f"reason {letter}") for letter in "abcdefg"]
    *_, fifth, rest = describe_passed_over(many)
    assert fifth == "fsdp: reason e"
    assert rest == snapshot


def test_a_card_of_which_too_little_is_known_gets_no_times(
    large: MadeUpModel, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def unknown(*_: object, **__: object) -> StepTime:
        raise Impossible("how fast its memory is is not known")

    monkeypatch.setattr(timing, "predict_time", unknown)
    answer = answer_of(large, question())
    assert answer.chosen.value.time is None
    assert answer.chosen.value.candidate.micro_batch_size == 8, "the largest that fits"
    assert [one for one in answer.findings if one.name == "not-timed"] == snapshot


def test_traces_that_disagree_with_what_was_computed_are_told(
    large: MadeUpModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(records: Sequence[TraceRecord], traced: TraceRecord) -> None:
        raise Impossible("it differs by 3 %", fix="try it")

    monkeypatch.setattr(memory, "check_records", differs)
    (found,) = [
        one
        for one in make_plan(question(), large.look, rates=RATES).findings
        if one.name == "not-a-line"
    ]
    assert (found.what, found.fix) == ("it differs by 3 %", "try it")


def test_the_first_trace_is_of_what_fits_by_a_formula(tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    work = Work(model_name_or_path=".", folder=str(tmp_path), sequence_length=8192)

    def first(memory_gib: float) -> Candidate:
        asked = question(hardware(memory_gib=memory_gib), work=work)
        return scout(search_order(asked), asked)

    assert first(300).strategy == "ddp"
    assert (first(40).strategy, first(40).recompute) == ("fsdp", "full")


def test_states_are_not_moved_to_the_host_where_samples_alone_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MadeUpModel(sample_gib=900.0).stand_in(monkeypatch)
    with pytest.raises(Impossible) as refused:
        answer_of(model, question(micro_batch_size=1))
    assert not any(one.candidate.cpu_offload for one in model.traced)
    assert "GPUs (" not in refused.value.fix, "more GPUs do not help either"


def test_inputs_that_wait_are_seen_from_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MadeUpModel(sample_gib=35.0).stand_in(monkeypatch)
    answer_of(model, question(strategy="fsdp", recompute="none", global_batch_size=64))
    assert {one.candidate.micro_batch_size for one in model.traced} == {1, 2, 3}
