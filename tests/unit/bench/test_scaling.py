"""A scaling study on figures made up by a known machine: losses add up, go where they belong, and forecasts hold."""

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench import scaling
from torchmuster.bench.environment import Environment
from torchmuster.bench.scaling import (
    BESIDE,
    COMMUNICATION,
    DATA,
    IDEAL,
    IMBALANCE,
    LOSSES,
    MODES,
    SMALLER,
    OnRanks,
    ScalingStudy,
    ScalingTimes,
    StepTimes,
    Taken,
    checked_forecasts,
    forecast_scaling,
    scaled,
    settled,
)
from torchmuster.bench.scaling_report import scaling_report
from torchmuster.errors import Impossible
from torchmuster.finding import Status
from torchmuster.plan.job import Work

STUDY = ScalingStudy(
    work=Work(build="my:model", sequence_length=8),
    strategy="ddp",
    precision="fp32",
    ranks=(1, 2, 4),
    whole=8,
    micro_batch_size=None,
    workers=0,
    device="cpu",
    threads=1,
    slots=2,
    rounds=9,
    passes=1,
)
HERE = Environment(
    host="gpu-server",
    system="Linux",
    cpu="a processor",
    cores=2,
    threads=None,
    memory_bytes=None,
    devices=(),
    driver=None,
    torch="2.13.0",
    python="3.12",
    torchmuster="0",
)
SAMPLE_S, FIXED_S, SENT_BYTES, BYTES_S, LATENCY_S = 0.1, 0.02, 4_000_000, 1e8, 1e-3


def machine(
    study: ScalingStudy,
    *,
    beside: float = 1.0,
    straggling_s: float = 0.0,
    read_s: float = 0.0,
    sending: float = 1.0,
    own_s: float = 0.0,
    shards: int = 0,
) -> dict[int, OnRanks]:
    """Return what a machine would show whose ranks take turns beyond its slots and send in rings.

    ``own_s`` is what the strategy does besides, and with ``shards`` it is fsdp.
    """
    found = {}
    for ranks in study.ranks:
        turns = study.crowding(ranks)
        slow = 1 + (beside - 1) * (min(ranks, study.slots or ranks) - 1)
        waiting_s = LATENCY_S * (ranks - 1)
        carrying_s = ring_s(ranks, SENT_BYTES) - waiting_s
        # All weights twice and all gradients once, by half a ring each, in as many messages.
        if shards:
            waiting_s, carrying_s = 3 * shards * waiting_s, 3 / 2 * carrying_s
        sent_s = sending * (waiting_s + turns * carrying_s)
        exposed_s = sent_s + turns * own_s if ranks > 1 else 0.0
        by_portion = {}
        for portion in study.portions(ranks):
            alone_s = (FIXED_S + SAMPLE_S * portion) * slow * turns
            extra_s = read_s * (ranks - 1)
            slowest_s = alone_s + extra_s + (straggling_s * turns if ranks > 1 else 0.0)
            by_portion[portion] = Taken(
                step_s=(slowest_s + exposed_s,) * 9,
                alone_s=(alone_s + extra_s,) * 9,
                alone_slowest_s=(slowest_s,) * 9,
                read_s=extra_s,
            )
        messages = (
            {size: (ring_s(ranks, size),) * 9 for size in (4096, SENT_BYTES // 8, SENT_BYTES)}
            if ranks > 1
            else {}
        )
        found[ranks] = OnRanks(
            ranks=ranks,
            sent_bytes=SENT_BYTES,
            shards=shards,
            backend="gloo",
            by_portion=by_portion,
            messages_s=messages,
        )
    return found


def ring_s(ranks: int, size_bytes: int) -> float:
    return LATENCY_S * (ranks - 1) + size_bytes / BYTES_S * 2 * (ranks - 1) / ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_add_up_to_the_step_and_none_is_negative(ranks: int, mode: scaling.Mode) -> None:
    seen = scaled(STUDY, machine(STUDY, beside=1.1, straggling_s=0.01, read_s=0.002), ranks, mode)
    assert sum(seen.parts_s.values()) == pytest.approx(seen.step_s.median)
    assert min(seen.parts_s.values()) >= 0


@pytest.mark.parametrize(
    ("named", "made"),
    [
        (BESIDE, {"beside": 1.8, "sending": 0.0}),
        (IMBALANCE, {"straggling_s": 0.5, "sending": 0.0}),
        (DATA, {"read_s": 0.5, "sending": 0.0}),
        (COMMUNICATION, {"sending": 20.0}),
    ],
)
def test_a_loss_goes_where_it_belongs(named: str, made: dict[str, Any]) -> None:
    seen = scaled(STUDY, machine(STUDY, **made), 2, "weak")
    assert seen.worst_loss == named
    assert seen.parts_s[named] > 0.9 * sum(seen.parts_s[name] for name in LOSSES)


def test_what_does_not_shrink_is_lost_with_strong_scaling_only() -> None:
    measured = machine(STUDY, sending=0.0)
    assert scaled(STUDY, measured, 2, "weak").parts_s[SMALLER] == 0
    strong = scaled(STUDY, measured, 2, "strong").parts_s
    assert strong[SMALLER] == pytest.approx(FIXED_S / 2)
    assert strong[IDEAL] == pytest.approx((FIXED_S + 8 * SAMPLE_S) / 2)


def test_speed_up_and_efficiency_of_two_free_ranks() -> None:
    seen = scaled(STUDY, machine(STUDY, sending=0.0), 2, "weak")
    assert seen.speed_up.median == pytest.approx(2)
    assert seen.efficiency.median == pytest.approx(1)
    assert seen.throughput.median == pytest.approx(16 / (FIXED_S + 8 * SAMPLE_S))
    assert seen.worst_loss is None


def test_a_difference_that_noise_made_negative_is_no_loss() -> None:
    parts = settled({IDEAL: 1.0, SMALLER: 0.3, BESIDE: -0.1, **dict.fromkeys((DATA, IMBALANCE, COMMUNICATION), 0.0)}, 1.2)  # fmt: skip
    assert parts[BESIDE] == 0
    assert parts[SMALLER] == pytest.approx(0.2)
    assert sum(parts.values()) == pytest.approx(1.2)


def test_ranks_that_are_faster_than_ideal_lose_nothing() -> None:
    parts = settled({IDEAL: 1.5, **dict.fromkeys(LOSSES, -0.1)}, 1.2)
    assert parts == {IDEAL: 1.2, **dict.fromkeys(LOSSES, 0.0)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [0, 7])
@pytest.mark.parametrize("own_s", [0.0, 0.1])
def test_a_machine_that_follows_the_rules_is_forecast_exactly(
    mode: scaling.Mode, shards: int, own_s: float
) -> None:
    measured = machine(STUDY, beside=1.2, straggling_s=0.01, shards=shards, own_s=own_s)
    made = forecast_scaling(STUDY, measured, 4, mode, few=2)
    assert made is not None
    truth = scaled(STUDY, measured, 4, mode)
    assert made.throughput == pytest.approx(truth.throughput.median, rel=1e-3)
    assert made.from_ranks == (1, 2)


def test_ranks_with_devices_of_their_own_do_not_take_turns() -> None:
    free = ScalingStudy(**{**vars(STUDY), "slots": 4})
    measured = machine(free, beside=1.1)
    made = forecast_scaling(free, measured, 4, "weak", few=2)
    assert made is not None
    assert made.throughput == pytest.approx(scaled(free, measured, 4, "weak").throughput.median)


def test_a_forecast_needs_the_portion_on_fewer_ranks() -> None:
    assert forecast_scaling(STUDY, machine(STUDY), 8, "strong", few=4) is None
    assert forecast_scaling(STUDY, machine(STUDY), 8, "weak", few=4) is not None


def test_the_report_says_what_more_ranks_bring_and_why_not_more(
    snapshot: SnapshotAssertion,
) -> None:
    measured = machine(STUDY, own_s=ring_s(4, SENT_BYTES))
    made = scaling_report(
        *(STUDY, measured),
        what="a small GPT",
        choices=(),
        notes=(),
        environment=HERE,
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )
    said = {one.name: one for one in made.findings}
    weak = said["weak-scaling"]
    assert "4 ranks are 1.74 times" in weak.what
    assert "4 ranks" in said["crowded"].what
    assert said["forecast"].status is Status.OK
    for name in ("weak-scaling", "crowded", "forecast", "outlook"):
        assert said[name] == snapshot(name=name)
    assert {one.title for one in made.pictures} == {"Speed-up", "Time breakdown"}
    assert all("100%" not in row for row in made.tables[1].rows)
    assert [one.error for one in checked_forecasts(STUDY, measured)] == pytest.approx([0, 0])


def test_fewer_ranks_that_are_faster_are_a_warning() -> None:
    made = scaling_report(
        *(STUDY, machine(STUDY, sending=10.0)),
        what="a small GPT",
        choices=(),
        notes=(),
        environment=HERE,
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )
    strong = next(one for one in made.findings if one.name == "strong-scaling")
    assert strong.status is Status.WARNING
    assert "; 1 are faster" in strong.what
    assert "muster bench collectives" in strong.fix


def test_ranks_are_put_together_round_by_round() -> None:
    def seen(rank: int, step: tuple[float, ...], alone: tuple[float, ...]) -> ScalingTimes:
        return ScalingTimes(
            rank=rank,
            device="cpu",
            backend="gloo",
            sent_bytes=4,
            shards=0,
            by_portion={8: StepTimes(step_s=step, alone_s=alone, read_s=0.5)},
            messages_s={4: step},
        )

    both = scaling.join_scaling_times(
        [[seen(0, (1.0, 4.0), (1.0, 2.0)), seen(1, (2.0, 3.0), (3.0, 1.0))]] * 2
    )
    taken = both.by_portion[8]
    assert both.ranks == 2
    assert taken.step_s == (2.0, 4.0) * 2
    assert taken.alone_s == (2.0, 1.5) * 2
    assert taken.alone_slowest_s == (3.0, 2.0) * 2
    assert both.messages_s == {4: (2.0, 4.0) * 2}


def test_every_number_of_ranks_is_timed_with_the_portions_of_larger_ones() -> None:
    assert STUDY.portions(1) == (8, 4, 2)
    assert STUDY.portions(2) == (8, 4, 2)
    assert STUDY.portions(4) == (8, 2)


@pytest.mark.parametrize(
    ("changed", "words", "fix"),
    [
        ({"ranks": (2, 4)}, "invalid numbers of ranks: 2, 4", "--ranks 1,2,4"),
        ({"ranks": (1,)}, "invalid numbers of ranks: 1", "--ranks 1,2,4"),
        ({"whole": 6}, "6 samples cannot be split evenly over 4 ranks", "--batch-size 4"),
    ],
)
def test_studies_that_cannot_be_made_are_refused(
    changed: dict[str, object], words: str, fix: str
) -> None:
    with pytest.raises(Impossible, match=words) as raised:
        scaling.check_scaling_request(ScalingStudy(**{**vars(STUDY), **changed}))
    assert raised.value.fix == fix
