"""Which configuration is chosen, what is refused and offered; the traces are made up."""

from dataclasses import replace

import pytest

from made_up_plans import WORK, MadeUpModel, fsdp, hardware, question
from torchmuster.errors import Impossible
from torchmuster.plan import search
from torchmuster.plan.answer import Answer, Forecast
from torchmuster.plan.estimate import Memory
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

HUB = replace(WORK, build=None, model_name_or_path="owner/name")


def plan(request: PlanRequest, model: MadeUpModel | None = None) -> Answer:
    return search.make_plan(request, (model or MadeUpModel()).trace)


def chosen(answer: Answer) -> Candidate:
    return answer.chosen.value.candidate


def test_a_small_model_is_copied() -> None:
    answer = plan(question(), MadeUpModel(parameters=1_000_000_000, sample_gib=1))
    assert chosen(answer).name == "ddp"
    assert chosen(answer).recompute == "none"
    assert chosen(answer).layout.ranks == 8


def test_one_gpu_needs_no_strategy() -> None:
    answer = plan(question(hardware(cards=1)), MadeUpModel(parameters=1_000_000_000, sample_gib=1))
    assert chosen(answer).name == "single"


def test_states_that_do_not_fit_are_sharded() -> None:
    answer = plan(question())
    assert chosen(answer).name == "fsdp"
    assert list(answer.skipped) == ["ddp"]
    assert "its states alone need 104 GiB" in answer.skipped["ddp"]
    assert "ddp" in answer.chosen.reason


def test_activations_are_recomputed_only_where_they_do_not_fit() -> None:
    assert chosen(plan(question(), MadeUpModel(sample_gib=10))).recompute == "none"
    assert chosen(plan(question(), MadeUpModel(sample_gib=50))).recompute == "selective"
    assert chosen(plan(question(), MadeUpModel(sample_gib=300))).recompute == "full"


def test_the_search_stops_when_simple_candidates_fit() -> None:
    model = MadeUpModel(sample_gib=50)
    plan(question(), model)
    modes = {request.candidate.recompute for request in model.traced}
    assert modes == {"none", "selective"}
    assert len(model.traced) <= 9


def test_several_machines_keep_shards_within_a_machine() -> None:
    answer = plan(question(hardware(machines=4)))
    assert chosen(answer).name == "hybrid 4 x 8"


def test_offload_is_the_last_resort_and_comes_with_offers() -> None:
    small = question(hardware(cards=2, memory_gib=24), work=HUB)
    answer = plan(small, MadeUpModel(sample_gib=16))
    assert chosen(answer).cpu_offload
    assert answer.chosen.value.fits
    assert [offer.name for offer in answer.offers] == ["LoRA", "QLoRA"]
    lora, qlora = answer.offers
    assert lora.flags == "--set 'model.lora={r: 16}' --set model.torch_dtype=bfloat16"
    assert qlora.flags.endswith("--set model.load_in_4bit=true")
    assert not lora.forecast.candidate.cpu_offload
    assert qlora.forecast.candidate.strategy == "ddp"
    assert lora.trained_count == 70_000_000


def test_what_fits_nowhere_says_what_is_missing_and_what_helps() -> None:
    request = question(hardware(cards=2, memory_gib=24), work=HUB, cpu_offload=False)
    with pytest.raises(Impossible) as refused:
        plan(request, MadeUpModel(sample_gib=10))
    assert refused.value.what.startswith("this training does not fit on 2 GPUs with 24.0 GiB")
    assert "its states alone need 52.2 GiB" in refused.value.why
    assert "--set model.load_in_4bit=true" in refused.value.fix


def test_more_gpus_are_computed() -> None:
    request = question(hardware(memory_gib=15), cpu_offload=False, recompute="full")
    with pytest.raises(Impossible) as refused:
        plan(request, MadeUpModel(sample_gib=10))
    assert "GiB too much" in refused.value.why
    assert "16 x made-up (--hardware 2x8xmade-up)" in refused.value.fix


def test_what_may_not_fit_is_chosen_with_a_warning() -> None:
    answer = plan(question(hardware(memory_gib=33), recompute="none", cpu_offload=False))
    assert not answer.chosen.value.fits
    assert answer.chosen.value.probably_fits
    assert "tight" in [finding.name for finding in answer.findings]


def test_the_request_is_kept() -> None:
    fixed = question(
        strategy="fsdp", sharding="shard_grad_op", recompute="full", micro_batch_size=3
    )
    candidate = chosen(plan(fixed))
    assert candidate.name == "shard_grad_op"
    assert (candidate.recompute, candidate.micro_batch_size) == ("full", 3)
    with pytest.raises(Impossible, match="no strategy for 8 GPUs"):
        plan(question(strategy="ddp", sharding="full_shard"))


class Refusing(MadeUpModel):
    """A model whose traces are refused for some strategies."""

    refused: tuple[str, ...] = ()

    def trace(self, request: TraceRequest) -> TraceRecord:
        """Return the made-up record, or refuse."""
        if request.steps and request.candidate.strategy in self.refused:
            raise Impossible("cannot be traced", fix="change it")
        return super().trace(request)


def test_a_refused_trace_ends_the_plan_only_if_all_are_refused() -> None:
    model = Refusing(parameters=1_000_000_000, sample_gib=1)
    model.refused = ("ddp",)
    answer = plan(question(), model)
    assert chosen(answer).name == "fsdp"
    assert answer.skipped == {"ddp": "cannot be traced"}
    model.refused = ("ddp", "fsdp")
    with pytest.raises(Impossible, match="cannot be traced") as refused:
        plan(question(), model)
    assert refused.value.fix == "change it"


def test_a_global_batch_is_divided_among_ranks() -> None:
    answer = plan(question(global_batch_size=96), MadeUpModel(sample_gib=5))
    candidate = chosen(answer)
    assert candidate.micro_batch_size * candidate.accumulation == 12


def test_no_speed_is_forecast_on_a_cpu() -> None:
    machine = hardware(cards=2)
    cpu: Hardware = replace(machine, card=replace(machine.card, kind="cpu"))
    answer = plan(question(cpu), MadeUpModel(parameters=10_000_000, sample_gib=0.01))
    assert answer.chosen.value.time is None
    assert chosen(answer).micro_batch_size == 8


def forecast(candidate: Candidate, *, step_s: float, spare_gib: float) -> Forecast:
    whole = 80 * GiB
    high = whole - int(spare_gib * GiB)
    memory = Memory(
        tensor_bytes=high,
        by_category={},
        peak_at="backward",
        outside=(),
        total_bytes=high,
        low_bytes=high,
        high_bytes=high,
        host_bytes=0,
    )
    time = search.estimate.StepTime(
        step_s=step_s,
        compute_s=step_s,
        samples_per_s=8 / step_s,
        tokens_per_s=None,
    )
    return Forecast(
        candidate=candidate,
        memory=memory,
        time=time,
        spare_bytes=whole - high,
        host_spare_bytes=0,
    )


def test_a_margin_of_memory_is_preferred_over_five_percent_of_speed() -> None:
    tight = forecast(fsdp(), step_s=1.0, spare_gib=0.7)
    roomy = forecast(fsdp(recompute="selective"), step_s=1.04, spare_gib=20)
    assert search.best_of_each([tight, roomy])[0] is roomy
    slow = forecast(fsdp(recompute="full"), step_s=1.2, spare_gib=40)
    assert search.best_of_each([tight, slow])[0] is tight


def test_of_equally_fast_ones_the_simplest_is_preferred() -> None:
    copies = replace(fsdp(), strategy="ddp", layout=ShardLayout(copies=8, shards=1))
    simple = forecast(copies, step_s=1.04, spare_gib=20)
    complex_one = forecast(fsdp(), step_s=1.0, spare_gib=20)
    assert search.best_of_each([complex_one, simple])[0] is simple
