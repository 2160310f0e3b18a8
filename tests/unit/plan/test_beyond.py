"""The formulas for what the product does not train: what must hold of them whatever the constants are."""

from dataclasses import replace

import pytest

from torchmuster.plan.hardware.model import Card, Hardware, Link
from torchmuster.plan.timing.rates import CATALOGUED
from torchmuster.plan.what_if import beyond
from torchmuster.plan.what_if.beyond import Decoder, Portion, Spread
from torchmuster.plan.what_if.beyond_time import Shares, Time, step_time

LLAMA_8B = Decoder(blocks=32, width=4096, inner=14336, heads=32, key_heads=8, vocabulary=128256)
LLAMA_405B = Decoder(
    blocks=126, width=16384, inner=53248, heads=128, key_heads=8, vocabulary=128256
)
SHARES = Shares(products=0.5, attention=0.5)
H100 = Card(
    name="H100",
    memory_bytes=80 * 10**9,
    flops={"bfloat16": 989e12},
    bandwidth_bytes_s=3.35e12,
)
ONE_SEQUENCE = Portion(sequence_length=8192, batch=1)


def _hardware(cards: int) -> Hardware:
    return Hardware(
        card=H100,
        machines=max(cards // 8, 1),
        cards_per_machine=8,
        within=Link(latency_s=2e-6, bytes_s=450e9),
        between=Link(latency_s=4e-6, bytes_s=50e9),
    )


def _time(spread: Spread, portion: Portion = ONE_SEQUENCE, decoder: Decoder = LLAMA_8B) -> Time:
    return step_time(
        decoder,
        spread,
        portion,
        hardware=_hardware(spread.ranks),
        shares=SHARES,
        rates=CATALOGUED,
    )


def test_the_count_of_parameters_is_the_published_one() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_405B.parameters == 405_853_388_800


def test_one_card_computes_what_its_rate_allows_and_waits_for_nobody() -> None:
    time = _time(Spread())
    trained = LLAMA_8B.parameters - LLAMA_8B.vocabulary * LLAMA_8B.width
    products = 6 * trained * 8192 / (989e12 * 0.5)
    # Half of all pairs; the backward of attention is two and a half forwards.
    attention = 3.5 * 32 * 2 * 8192 * 4096 * 8192 / (989e12 * 0.5)
    assert time.compute_s == pytest.approx(products + attention, rel=2e-4)  # norms have no products
    assert (time.tensor_s, time.exposed_s, time.bubble_s) == (0.0, 0.0, 0.0)
    assert time.step_s == pytest.approx(time.compute_s + time.update_s)


@pytest.mark.parametrize(
    ("recompute", "more"),
    [("full", 1.0), (2, 0.5), ("op", 0.365)],
)
def test_recomputing_takes_a_part_of_a_forward_more(recompute: str | int, more: float) -> None:
    # Short sequences: then the products are all there is.
    short = Portion(sequence_length=16, batch=512)
    without_head = replace(LLAMA_8B, vocabulary=1)
    plain = _time(Spread(), short, without_head).compute_s
    again = _time(Spread(), replace(short, recompute=recompute), without_head).compute_s  # type: ignore[arg-type]
    assert again / plain == pytest.approx(1 + more / 3, rel=0.01)


def test_shards_beyond_the_rows_are_made_up() -> None:
    assert beyond.inflation(LLAMA_8B, 8) == 1.0
    assert beyond.inflation(LLAMA_8B, 16384) == pytest.approx(2.92, abs=0.01)
    assert beyond.inflation(LLAMA_8B, 100_000) == pytest.approx(17.84, abs=0.01)
    # Tensor parallelism leaves fewer rows to share.
    assert beyond.inflation(LLAMA_8B, 1024, tensor=8) > beyond.inflation(LLAMA_8B, 1024)


def test_full_sharding_stops_paying_and_hybrid_does_not() -> None:
    few, many = _time(Spread(shards=128)), _time(Spread(shards=16384))
    hybrid = _time(Spread(copies=2048, shards=8))
    assert many.exposed_s > 2 * many.compute_s > 100 * few.exposed_s
    assert hybrid.step_s < 1.1 * few.step_s


def test_tensor_parallelism_exchanges_activations_unless_they_are_hidden() -> None:
    spread = Spread(shards=8, tensor=8)
    open_ = _time(spread)
    hidden = step_time(
        LLAMA_8B,
        spread,
        ONE_SEQUENCE,
        hardware=_hardware(64),
        shares=replace(SHARES, hides_tensor=True),
        rates=CATALOGUED,
    )
    assert open_.tensor_s > 0.2 * open_.compute_s
    assert hidden.tensor_s < open_.tensor_s
    assert open_.compute_s == pytest.approx(_time(Spread()).compute_s / 8)


def test_a_pipeline_waits_less_with_more_micro_batches_and_with_chunks() -> None:
    cut = Portion(sequence_length=8192, batch=32, micro_batches=8)
    stages = Spread(tensor=8, pipeline=8)
    once = _time(stages, cut, LLAMA_405B)
    assert once.bubble_s / (once.compute_s + once.tensor_s) == pytest.approx(7 / 8)
    more = _time(stages, replace(cut, micro_batches=32), LLAMA_405B)
    chunked = _time(replace(stages, chunks=2), cut, LLAMA_405B)
    assert more.bubble_s < once.bubble_s / 3
    assert chunked.bubble_s == pytest.approx(once.bubble_s / 2)


def test_a_context_shares_tokens_and_exchanges_keys() -> None:
    long = Portion(sequence_length=131072, batch=1, recompute="full")
    alone, together = _time(Spread(shards=8), long), _time(Spread(context=8), long)
    assert together.compute_s == pytest.approx(alone.compute_s / 8)
    assert together.tensor_s > 0.0
    kept = beyond.memory(LLAMA_8B, Spread(context=8), long)
    assert kept["activations"] * 8 == beyond.memory(LLAMA_8B, Spread(shards=8), long)["activations"]


def test_memory_by_what_it_is() -> None:
    found = beyond.memory(LLAMA_8B, Spread(), ONE_SEQUENCE)
    assert found["states"] == 16 * LLAMA_8B.parameters
    assert "gathered" not in found
    sharded = beyond.memory(LLAMA_8B, Spread(shards=8), ONE_SEQUENCE)
    assert sharded["states"] == pytest.approx(2 * LLAMA_8B.parameters)
    assert sharded["gathered"] > 12 * LLAMA_8B.block_parameters
    assert sharded["worst moment"] == 12 * 8192 * 128256  # the logits
    kept = [
        beyond.memory(LLAMA_8B, Spread(shards=8), replace(ONE_SEQUENCE, recompute=kind))[
            "activations"
        ]
        for kind in ("full", "op", 2, "none")
    ]
    assert kept == sorted(kept)
    assert kept[0] == 32 * 8192 * 2 * 4096  # what enters each block


def test_405b_does_not_fit_80_gb_by_sharding_alone() -> None:
    portion = replace(ONE_SEQUENCE, recompute="full")
    for shards in (128, 1024, 8192):
        assert sum(beyond.memory(LLAMA_405B, Spread(shards=shards), portion).values()) > 80e9
    fits = Spread(shards=64, tensor=8, pipeline=8)
    cut = replace(portion, batch=8, micro_batches=8)
    assert sum(beyond.memory(LLAMA_405B, fits, cut).values()) < 80e9


def test_micro_batches_in_flight() -> None:
    cut = Portion(sequence_length=8192, batch=32, micro_batches=32, recompute="full")
    stages = Spread(tensor=8, pipeline=8)
    one = beyond.memory(LLAMA_405B, stages, replace(cut, micro_batches=1, batch=1))
    first = beyond.memory(LLAMA_405B, stages, cut)
    chunked = beyond.memory(LLAMA_405B, replace(stages, chunks=2), cut)
    assert first["activations"] == 8 * one["activations"]
    assert chunked["activations"] == 11.5 * one["activations"]  # 14 + 8 + 1 chunks of half a stage
