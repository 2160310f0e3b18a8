"""Rates that were measured: the weakest rank's, fitted to one run, used for this machine only."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.decision import Decision
from torchmuster.errors import MusterError
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import (
    Stretch,
    TracedCollective,
    TracedOperation,
    TraceRecord,
    TraceRequest,
)
from torchmuster.plan.timing import calibration, fitting
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing import rates as links
from torchmuster.plan.timing.calibration import Calibration, RankRates
from torchmuster.plan.timing.fitting import RealRun
from torchmuster.plan.timing.rates import LinkGroup, Rates, usual_rates
from torchmuster.train.strategies.sharding import ShardLayout

MEASURED = RankRates(
    flops={"float32": 1e11, "bfloat16": 2e11},
    bandwidth_bytes_s=1e10,
    operation_s=0.0,
    sharded_operation_s=2e-5,
    new_memory_bytes_s=1e9,
    slow_operations={"aten.bernoulli_": 1e8},
    collectives={"all_reduce 2": Link(latency_s=1e-3, bytes_s=1e9, source="measured")},
)
FOUND = Calibration(machine="somewhere", date="2026-01-02", by_ranks={1: MEASURED, 2: MEASURED})
HERE = Hardware(
    card=Gpu(name="cpu", memory_bytes=1, flops={"float32": 1.0}, bandwidth_bytes_s=1.0, kind="cpu"),
    machines=1,
    cards_per_machine=2,
    within=Link(latency_s=0.0, bytes_s=1.0),
    between=Link(latency_s=0.0, bytes_s=1.0),
)
ALONE = Candidate(strategy="single", layout=ShardLayout(copies=1, shards=1))


def record() -> TraceRecord:
    """Return one second of products and, at the measured bandwidth, one second of moving."""
    work = (
        TracedOperation(name="aten.mm", dtype="float32", count=1, flops=10**11, moved_bytes=0),
        TracedOperation(name="aten.add", dtype="float32", count=1, flops=0, moved_bytes=10**10),
    )
    return TraceRecord(
        request=TraceRequest(work=Work(), candidate=ALONE),
        torch="",
        blocks_traced=1,
        blocks=1,
        blocks_alike=True,
        parameters=(),
        parameter_count=1,
        trained_count=1,
        samples_per_micro_batch=1,
        tokens_per_sample=None,
        states={},
        first_step_peak_bytes=0,
        peaks=(),
        timeline=(Stretch(phase="forward", micro_batch=0, block=None, operations=work),),
        host_bytes=0,
    )


def run(step_s: float) -> RealRun:
    on = calibration.hardware_as_measured(FOUND, HERE)
    return RealRun(
        records=(record(),), candidate=ALONE, hardware=on, step_s=step_s, words="a little run"
    )


def predicted(rates: Rates) -> float:
    one = run(1.0)
    return timing.predict_time(one.records, ALONE, hardware=one.hardware, rates=rates).step_s


def test_all_wait_for_the_weakest_rank() -> None:
    slow = dataclasses.replace(
        MEASURED,
        flops={"float32": 5e10, "bfloat16": 3e11},
        new_memory_bytes_s=5e8,
        slow_operations={"aten.bernoulli_": 2e8},
        collectives={"all_reduce 2": Link(latency_s=2e-3, bytes_s=2e9)},
    )
    found = calibration.weakest_rank([MEASURED, slow])
    assert found.flops == {"float32": 5e10, "bfloat16": 2e11}
    assert found.new_memory_bytes_s == 5e8
    assert found.slow_operations == {"aten.bernoulli_": 1e8}
    assert found.collectives["all_reduce 2"].latency_s == 2e-3
    assert found.collectives["all_reduce 2"].bytes_s == 1e9


def test_a_dtype_that_one_rank_lacks_has_no_rate() -> None:
    older = dataclasses.replace(MEASURED, flops={"float32": 5e10})  # a GPU without bf16
    for found in ([MEASURED, older], [older, MEASURED]):
        assert calibration.weakest_rank(found).flops == {"float32": 5e10}


def test_measured_rates_take_the_place_of_others() -> None:
    on = calibration.hardware_as_measured(FOUND, HERE)
    assert on.card.flops == {"float32": 1e11, "bfloat16": 2e11}
    assert on.card.source == "measured on somewhere on 2026-01-02"
    rates = calibration.calibrated_rates(FOUND, on)
    assert rates.source == "measured on somewhere on 2026-01-02"
    assert rates.measured("all_reduce", 2) == MEASURED.collectives["all_reduce 2"]
    assert rates.measured("all_reduce", 4) is None
    assert rates.sharded_operation_s == 2e-5
    assert (rates.new_memory_bytes_s, rates.slow_operations) == (1e9, {"aten.bernoulli_": 1e8})
    assert not rates.beside
    alone = dataclasses.replace(MEASURED, sharded_operation_s=None)
    without = dataclasses.replace(FOUND, by_ranks={2: alone})
    usually = usual_rates("cpu").sharded_operation_s
    assert calibration.calibrated_rates(without, on).sharded_operation_s == usually


def test_links_are_those_that_were_measured() -> None:
    on = calibration.hardware_as_measured(FOUND, HERE)
    assert on.within.source == "measured on somewhere on 2026-01-02"
    sums = calibration.calibrated_rates(FOUND, on)
    pair = LinkGroup(ranks=2, ranks_of_machine=2)
    whole = links.transfer_seconds("all_reduce", 3e9, pair, hardware=on, rates=sums)
    as_a_ring = dataclasses.replace(sums, collectives={})
    assert links.transfer_seconds(
        "all_reduce", 3e9, pair, hardware=on, rates=as_a_ring
    ) == pytest.approx(whole)
    many = dataclasses.replace(HERE, cards_per_machine=8)
    assert calibration.hardware_as_measured(FOUND, many).within == HERE.within
    alone = dataclasses.replace(HERE, cards_per_machine=1)
    assert calibration.hardware_as_measured(FOUND, alone).within == HERE.within


def test_numbers_of_ranks_that_were_not_measured_have_their_share() -> None:
    many = dataclasses.replace(HERE, cards_per_machine=8)
    eight = calibration.hardware_as_measured(FOUND, many)
    assert eight.card.flops["float32"] == 1e11 * 2 / 8
    assert eight.card.bandwidth_bytes_s == 1e10 * 2 / 8
    rates = calibration.calibrated_rates(FOUND, many)
    assert rates.sharded_operation_s == 2e-5 * 8 / 2
    assert rates.new_memory_bytes_s == 1e9 * 2 / 8
    assert rates.slow_operations == {"aten.bernoulli_": 1e8 * 2 / 8}
    crowded = dataclasses.replace(FOUND, by_ranks={2: MEASURED, 8: MEASURED}, cores=2)
    assert calibration.hardware_as_measured(crowded, many).card.flops["float32"] == 1e11 * 2 / 8
    on_gpus = dataclasses.replace(FOUND, device="gpu")
    assert calibration.hardware_as_measured(on_gpus, many).card.flops["float32"] == 1e11
    assert calibration.hardware_as_measured(on_gpus, many).card.bandwidth_bytes_s == 1e10


def test_what_was_measured_of_something_else_is_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(calibration, "usable_cores", lambda: Decision(value=4, reason=""))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13")
    monkeypatch.setattr("platform.node", lambda: "somewhere")
    mine = dataclasses.replace(FOUND, device="cpu", cores=4, torch="2.13")
    on, rates = calibration.as_known(mine, HERE)
    assert (on.card.flops["float32"], rates.source) == (1e11, mine.source)
    on_gpu = dataclasses.replace(HERE, card=dataclasses.replace(HERE.card, kind="cuda"))
    elsewhere = {
        "on the CPU": (mine, on_gpu),
        "on GPUs": (dataclasses.replace(mine, device="gpu"), HERE),
        "cores": (dataclasses.replace(mine, cores=8), HERE),
        "unknown cores": (FOUND, HERE),
        "torch": (dataclasses.replace(mine, torch="2.12"), HERE),
        "machine": (dataclasses.replace(mine, machine="elsewhere"), HERE),
    }
    for differs, (found, hardware) in elsewhere.items():
        on, rates = calibration.as_known(found, hardware)
        assert on == hardware
        assert rates.compute == usual_rates(hardware.card.kind).compute
        assert "muster plan --calibrate" in rates.source
        assert rates.source == snapshot(name=differs)
    gpus = dataclasses.replace(mine, device="gpu", cores=64)
    assert calibration.as_known(gpus, on_gpu)[1].source == mine.source, "a GPU needs no cores"


def test_one_run_gives_the_share_of_the_memory_s_bandwidth(snapshot: SnapshotAssertion) -> None:
    rates = calibration.calibrated_rates(FOUND, HERE)
    assert predicted(rates) == pytest.approx(2.0)
    fitted = fitting.fit_rates(run(5.0), rates)
    assert (fitted.compute, fitted.memory) == pytest.approx((1.0, 0.25))
    assert predicted(fitted) == pytest.approx(5.0)
    assert fitted.source.endswith(", fitted to a little run")
    kept = fitting.with_fit(FOUND, run(1.5))
    for one in kept.by_ranks.values():
        assert (one.compute, one.memory) == pytest.approx((1.0, 2.0))
    assert kept.source == snapshot


def test_a_run_that_is_sooner_than_its_products_speeds_both_up() -> None:
    fitted = fitting.fit_rates(run(0.5), calibration.calibrated_rates(FOUND, HERE))
    assert (fitted.compute, fitted.memory) == pytest.approx((4.0, 4.0))


def test_one_constant_for_a_stack_of_which_nothing_else_is_known() -> None:
    fitted = fitting.fit_rates(run(8.0), calibration.calibrated_rates(FOUND, HERE), both=True)
    assert (fitted.compute, fitted.memory) == pytest.approx((0.25, 0.25))


def test_what_cannot_be_fitted_is_said(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(MusterError) as caught:
        fitting.fit_rates(run(1e9), calibration.calibrated_rates(FOUND, HERE))
    assert "1e+09 s" in caught.value.what
    assert caught.value == snapshot


def test_a_few_blocks_of_the_model_are_trained_here_to_fit_to(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    ran: list[tuple[Candidate, int | None]] = []
    takes = {"single": (7.0, 5.0, 6.0), "ddp": (3.0, 3.5, 4.0), "fsdp": (4.5, 4.0, 5.0)}

    def train(work: Work, candidate: Candidate, *, blocks: int | None, **how: Any) -> list[Any]:
        disturbed = 2.0 if (candidate, blocks) not in ran else 1.0
        ran.append((candidate, blocks))
        times = tuple(disturbed * one for one in takes[candidate.strategy])
        slow = [SimpleNamespace(step_s=times)]
        return slow + [SimpleNamespace(step_s=(0.1, 0.1, 0.1))] * (candidate.layout.ranks - 1)

    def look(asked: Sequence[TraceRequest]) -> list[TraceRecord]:
        """Return a second of products and one of moving; with fsdp a second of gathering too."""
        traced = dataclasses.replace(record(), blocks_traced=4, blocks=32)
        if asked[0].candidate.strategy != "fsdp":
            return [traced]
        whole = TracedCollective(
            kind="all_gather", ranks=2, between_copies=False, moved_bytes=10**9, dtype="float32"
        )
        gather = Stretch(phase="forward", micro_batch=0, block=None, collective=whole)
        return [dataclasses.replace(traced, timeline=(gather, *traced.timeline))]

    monkeypatch.setattr("torchmuster.plan.proof.verification.run_real_steps", train)
    gathers = {"all_gather 2": Link(latency_s=0.0, bytes_s=1e9)}
    two = dataclasses.replace(MEASURED, collectives=gathers)
    measured = dataclasses.replace(FOUND, by_ranks={1: MEASURED, 2: two}, cores=2)
    found = fitting.fit_here(measured, Work(build="my:model"), HERE, look)
    assert ran == [(one, 4) for one in [*fitting.fit_candidates(2)] * 2], "in turns"
    assert [one.memory for one in found.by_ranks.values()] == pytest.approx([0.25, 0.5])
    # 3 s without gathering: it took a second, and the second that it takes by itself
    assert found.by_ranks[2].sharded_communication == pytest.approx(1.0)
    takes["fsdp"] = (7.0, 8.0, 9.0)
    found = fitting.fit_here(measured, Work(build="my:model"), HERE, look)
    assert found.by_ranks[2].sharded_communication == pytest.approx(0.25)
    assert found.fitted_to == snapshot


def test_what_cannot_be_traced_is_not_fitted_to() -> None:
    assert fitting.fit_here(FOUND, Work(), HERE, lambda asked: ["refused"]) == FOUND


def test_it_is_kept_and_what_is_damaged_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    assert calibration.saved_calibration(tmp_path) is None
    path = calibration.save_calibration(FOUND, tmp_path / "cache")
    assert calibration.saved_calibration(tmp_path / "cache") == FOUND
    path.write_text("{", encoding="utf-8")
    assert calibration.saved_calibration(tmp_path / "cache") is None
