"""LoRA and QLoRA as offers, where full training fits nowhere or only with CPU offload."""

import dataclasses
from collections.abc import Sequence

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import RATES, MadeUpModel, hardware, question
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible
from torchmuster.plan.answer import Answer
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.planning import make_plan
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.report.page import plan_json, plan_page
from torchmuster.plan.report.terminal import plan_text
from torchmuster.plan.request import work_from_settings
from torchmuster.plan.search.candidates import device_spreads
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.units import GiB

NAMED = Work(model_name_or_path="made-up/named", sequence_length=1024)
TRAINED = 7_000_000


class AdaptableModel(MadeUpModel):
    """A model whose states are as small as LoRA and QLoRA make them."""

    def look(self, requests: Sequence[TraceRequest]) -> list[TraceRecord]:
        """Stand for the tracer."""
        found = []
        for one, made in zip(requests, super().look(requests), strict=True):
            if one.work.lora_rank is not None:
                dtype = "nf4" if one.work.load_in_4bit else one.work.torch_dtype or "float32"
                (shape,) = made.parameters
                frozen = dataclasses.replace(shape, dtype=dtype, trained=False)
                made = dataclasses.replace(made, parameters=(frozen,), trained_count=TRAINED)
            found.append(made)
        return found

    def memory(
        self, records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        """Stand for memory.predict."""
        work = records[0].request.work
        whole = super().memory(records, candidate, hardware=hardware)
        if work.lora_rank is None or candidate.cpu_offload:
            return whole
        item = 0.52 if work.load_in_4bit else 2 if work.torch_dtype == "bfloat16" else 4
        states = int(item * self.parameters) // candidate.layout.shards
        saved = whole.by_category["parameters"] - states
        return dataclasses.replace(
            whole,
            tensor_bytes=whole.tensor_bytes - saved,
            by_category={**whole.by_category, "parameters": states},
            total_bytes=int(1.02 * (whole.tensor_bytes - saved)),
            low_bytes=whole.tensor_bytes - saved,
            high_bytes=int(1.05 * (whole.tensor_bytes - saved)),
        )


def planned(monkeypatch: pytest.MonkeyPatch, memory_gib: float, **changes: object) -> Answer:
    model = AdaptableModel(sample_gib=2.0).stand_in(monkeypatch)
    asked = question(hardware(cards=2, memory_gib=memory_gib), **{"work": NAMED, **changes})
    return make_plan(asked, model.look, rates=RATES, simulate=False)


def test_a_plan_with_offload_offers_both_with_the_flags_that_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = planned(monkeypatch, 24)
    best = answer.chosen.value
    assert best.candidate.cpu_offload
    lora, qlora = answer.offers
    assert [one.name for one in answer.offers] == ["LoRA", "QLoRA"]
    assert lora.flags == "--set model.lora_rank=16 --set model.torch_dtype=bfloat16"
    assert qlora.flags == f"{lora.flags} --set model.load_in_4bit=true"
    for one in answer.offers:
        assert one.forecast.fits
        assert one.trained_count == TRAINED
        assert one.forecast.candidate.strategy == "ddp"
        assert (one.forecast.samples_per_s or 0.0) > (best.samples_per_s or 0.0)
    assert qlora.forecast.memory.low_bytes < 24 * GiB
    # What is trained stays what was asked for.
    assert answer.asked.work == NAMED


def test_flags_of_an_offer_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = planned(monkeypatch, 24)
    for one in answer.offers:
        flags = [Flag(flag="--set", path=path, text=text) for path, text in one.settings.items()]
        named = Flag(flag="--set", path="model.model_name_or_path", text="made-up/named")
        work = work_from_settings(resolve_settings(flags=[named, *flags]), folder=".")
        assert (work.lora_rank, work.torch_dtype) == (16, "bfloat16")
        assert work.load_in_4bit is (one.name == "QLoRA")


def test_a_model_that_fits_without_offload_gets_no_offer_and_no_further_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = AdaptableModel(sample_gib=2.0).stand_in(monkeypatch)
    asked = question(hardware(cards=2, memory_gib=80), work=NAMED)
    assert not make_plan(asked, model.look, rates=RATES, simulate=False).offers
    assert {one.work for one in model.traced} == {NAMED}


def test_a_model_of_ones_own_and_offload_that_was_asked_for_get_no_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not planned(monkeypatch, 24, work=Work(build="own:model", sequence_length=1024)).offers
    assert not planned(monkeypatch, 24, cpu_offload=True).offers


def test_what_is_requested_already_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = dataclasses.replace(NAMED, lora_rank=64)
    in_full, in_four = planned(monkeypatch, 12, work=lora).offers
    assert in_full.flags == "--set model.torch_dtype=bfloat16"
    assert in_full.rank == 64
    assert in_four.flags == "--set model.torch_dtype=bfloat16 --set model.load_in_4bit=true"
    of_16_bits = dataclasses.replace(lora, torch_dtype="bfloat16")
    with pytest.raises(Impossible) as refused:
        planned(monkeypatch, 6, work=of_16_bits, cpu_offload=False)
    offered = [line for line in refused.value.fix.splitlines() if "LoRA" in line]
    assert [line.partition(" (")[0] for line in offered] == ["--set model.load_in_4bit=true"]


def test_4_bits_are_never_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    four = dataclasses.replace(NAMED, lora_rank=16, load_in_4bit=True)
    spreads = device_spreads(question(hardware(cards=8, machines=2), work=four))
    assert {one.strategy for one in spreads} == {"single", "ddp"}
    answer = planned(monkeypatch, 24, strategy="fsdp")
    lora, qlora = answer.offers
    assert lora.forecast.candidate.strategy == "fsdp"
    assert qlora.forecast.candidate.strategy == "ddp"
    assert qlora.settings["distributed.strategy"] == "auto"


def test_fsdp_of_4_bits_is_refused(snapshot: SnapshotAssertion) -> None:
    four = dataclasses.replace(NAMED, lora_rank=16, load_in_4bit=True)
    for fixed in ({"strategy": "fsdp"}, {"cpu_offload": True}):
        with pytest.raises(Impossible, match="load_in_4bit") as refused:
            device_spreads(question(work=four, **fixed))
    assert refused.value == snapshot


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"model.model_name_or_path": "a/b"}, "model.lora_rank"),
        ({"model.build": "a:b", "model.lora_rank": "4"}, "model.model_name_or_path"),
    ],
)
def test_4_bits_need_lora_and_files(given: dict[str, str], missing: str) -> None:
    values = {**given, "model.load_in_4bit": "true", "data.sequence_length": "64"}
    flags = [Flag(flag="--set", path=path, text=text) for path, text in values.items()]
    with pytest.raises(Impossible, match=missing):
        work_from_settings(resolve_settings(flags=flags), folder=".")


def test_an_offer_that_does_not_fit_either_says_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = planned(monkeypatch, 6.9)
    lora, qlora = answer.offers
    assert not lora.forecast.fits
    assert qlora.forecast.fits
    text = plan_text(answer, line="")
    assert "too much" in text


def test_the_error_offers_what_fits(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        planned(monkeypatch, 24, cpu_offload=False)
    lines = [line for line in refused.value.fix.splitlines() if "lora_rank" in line]
    assert [("load_in_4bit" in line) for line in lines] == [False, True]
    assert refused.value == snapshot


def test_all_reports_show_offers(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    answer = planned(monkeypatch, 24)
    document = plan_json(answer, line="", settings={})
    lora, qlora = document["offers"]
    assert qlora["settings"]["model.load_in_4bit"] == "true"
    assert lora["forecast"]["memory"]["total_bytes"] > qlora["forecast"]["memory"]["total_bytes"]
    assert lora["forecast"]["time"]["tokens_per_s"] > 0
    assert lora["trained_count"] == TRAINED
    page, text = plan_page(answer, line=""), plan_text(answer, line="")
    for one in answer.offers:
        assert one.flags in page
        assert f"{one.flags}\n" in text
    assert text.split("\n\n")[4] == snapshot


def test_an_offer_of_a_model_that_cannot_be_adapted_here_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without peft the trace is refused, and there is no configuration for the formula."""
    model = AdaptableModel(sample_gib=2.0).stand_in(monkeypatch)

    def look(requests: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
        if any(one.work.lora_rank is not None for one in requests):
            return [TraceRefused(what="LoRA needs peft") for _ in requests]
        return [*model.look(requests)]

    asked = question(hardware(cards=2, memory_gib=24), work=NAMED)
    answer = make_plan(asked, look, rates=RATES, simulate=False)
    assert answer.chosen.value.candidate.cpu_offload
    assert not answer.offers
