"""Forecasts of step times from records made by hand: depth, micro-batch, shards, links and what hides what."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import cluster_file as hardware_given
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import (
    Shape,
    Stretch,
    TracedCollective,
    TracedOperation,
    TraceRecord,
    TraceRequest,
)
from torchmuster.plan.timing import forecast, schedule
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing import rates as links
from torchmuster.plan.timing.forecast import StepTime
from torchmuster.plan.timing.rates import LinkGroup, Rates, rate_key
from torchmuster.plan.timing.timeline import TimelineLoad, TimelinePace, TimelinePart
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import MiB

MB = 10**6
PARAMETERS = 16 * MB  # of one block, in numbers
BLOCKS = 10
RATES = Rates(
    compute=1.0,
    memory=1.0,
    communication=1.0,
    operation_s=0.0,
    sharded_operation_s=0.0,
    beside=True,
    source="made up",
)
CARD = Gpu(name="card", memory_bytes=10**10, flops={"float32": 1e12}, bandwidth_bytes_s=1e12)


def hardware(ranks: int = 4, link: Link | None = None, **changes: Any) -> Hardware:
    link = link or Link(latency_s=0.0, bytes_s=1e11)
    card = dataclasses.replace(CARD, **changes)
    return Hardware(card=card, machines=1, cards_per_machine=ranks, within=link, between=link)


def products(flops: int) -> tuple[TracedOperation, ...]:
    return (TracedOperation(name="aten.mm", dtype="float32", count=1, flops=flops, moved_bytes=0),)


def collective(kind: Any, size_bytes: int, **changes: Any) -> TracedCollective:
    one = TracedCollective(
        kind=kind, ranks=2, between_copies=False, moved_bytes=size_bytes, dtype="float32"
    )
    return dataclasses.replace(one, **changes)


def stretches(candidate: Candidate, blocks: int) -> list[Stretch]:
    """Return a step in which a block's forward is 1 ms a sample, its backward 2 ms, an update 1 ms a block."""
    sharded, size = candidate.strategy == "fsdp", candidate.micro_batch_size
    gather = collective("all_gather", 4 * PARAMETERS)
    found = []
    for micro in range(candidate.accumulation):

        def add(phase: Any, block: int | None, micro: int = micro, **what: Any) -> None:
            found.append(Stretch(phase=phase, micro_batch=micro, block=block, **what))

        for block in range(blocks):
            if sharded:
                add("forward", block, collective=gather)
            add("forward", block, operations=products(size * 10**9))
        add("loss", None, operations=products(0))
        for block in reversed(range(blocks)):
            first, last = block == blocks - 1, block == 0
            if sharded:
                for _ in range(first + (not last)):  # its own, and the next one's
                    add("backward", block, collective=gather)
            if candidate.recompute == "full":
                add("backward", block, operations=products(size * 10**9), recomputed=True)
            add("backward", block, operations=products(size * 2 * 10**9))
            if sharded:
                add("backward", block, collective=collective("reduce_scatter", 4 * PARAMETERS))
    moved = blocks * 10**9 // candidate.layout.shards
    update = TracedOperation(name="aten.add_", dtype="float32", count=1, flops=0, moved_bytes=moved)
    found.append(Stretch(phase="update", micro_batch=0, block=None, operations=(update,)))
    return found


def traced(candidate: Candidate, *, blocks: int = BLOCKS) -> list[TraceRecord]:
    shape = Shape(name="w", shape=(PARAMETERS // 16, 16), dtype="float32", trained=True, block=0)
    return [
        TraceRecord(
            request=TraceRequest(work=Work(), candidate=one, blocks=depth),
            torch="",
            blocks_traced=depth,
            blocks=blocks,
            blocks_alike=True,
            parameters=tuple(dataclasses.replace(shape, block=n) for n in range(depth)),
            parameter_count=blocks * PARAMETERS,
            trained_count=blocks * PARAMETERS,
            samples_per_micro_batch=size,
            tokens_per_sample=100,
            states={},
            first_step_peak_bytes=0,
            peaks=(),
            timeline=tuple(stretches(one, depth)),
            host_bytes=0,
        )
        for depth in (3, 4)
        for size in (1, 2)
        for one in [dataclasses.replace(candidate, micro_batch_size=size)]
    ]


def candidate(strategy: Any = "single", copies: int = 1, shards: int = 1, **more: Any) -> Candidate:
    return Candidate(strategy=strategy, layout=ShardLayout(copies=copies, shards=shards), **more)


def predict(
    wanted: Candidate,
    on: Hardware | None = None,
    *,
    rates: Rates = RATES,
    records: Sequence[TraceRecord] | None = None,
) -> StepTime:
    records = records or traced(dataclasses.replace(wanted, micro_batch_size=1))
    return timing.predict_time(records, wanted, hardware=on or hardware(), rates=rates)


def test_depth_and_micro_batch_are_those_of_the_whole_model() -> None:
    one = predict(candidate(micro_batch_size=8))
    assert one.step_s == pytest.approx(BLOCKS * 8 * 3e-3 + BLOCKS * 1e-3)
    assert one.exposed_s == 0.0
    assert one.model_flops == BLOCKS * 8 * 3e9
    assert one.samples_per_s == pytest.approx(8 / one.step_s)
    assert one.tokens_per_s == pytest.approx(800 / one.step_s)
    assert one.mfu == pytest.approx(one.model_flops / one.step_s / 1e12)


@pytest.mark.parametrize("depth", [3, 4])
def test_a_traced_depth_is_its_own_forecast(depth: int) -> None:
    wanted = candidate(micro_batch_size=2)
    one = predict(wanted, records=traced(wanted, blocks=depth))
    assert one.step_s == pytest.approx(depth * 2 * 3e-3 + depth * 1e-3)


def test_micro_batches_are_counted_and_the_update_comes_once() -> None:
    records = traced(candidate(accumulation=2))
    one = predict(candidate(accumulation=5), records=records)
    assert one.step_s == pytest.approx(5 * BLOCKS * 3e-3 + BLOCKS * 1e-3)


def test_what_is_computed_again_takes_time_and_is_no_work_of_the_model() -> None:
    plain, again = predict(candidate()), predict(candidate(recompute="full"))
    assert again.step_s - plain.step_s == pytest.approx(BLOCKS * 1e-3)
    assert again.model_flops == plain.model_flops


def test_frozen_parameters_ask_for_less_than_two_forwards_in_the_backward() -> None:
    wanted = candidate(recompute="full")
    frozen = [dataclasses.replace(one, trained_count=1) for one in traced(wanted)]
    backward = 2e9  # as it was traced, without what is computed again
    assert predict(wanted, records=frozen).model_flops == BLOCKS * (1e9 + backward)


def test_ddp_hides_its_buckets_behind_the_backward_but_the_last() -> None:
    one = predict(candidate("ddp", copies=4), hardware(link=Link(latency_s=0.0, bytes_s=1e12)))
    whole = BLOCKS * PARAMETERS * 4
    assert one.communication_s == pytest.approx(2 * 0.75 * whole / 1e12)
    assert 0.0 < one.exposed_s < 0.3 * one.communication_s
    slow = predict(candidate("ddp", copies=4), hardware(link=Link(latency_s=0.0, bytes_s=1e10)))
    assert slow.exposed_s > 0.8 * slow.communication_s


def test_ddp_reduces_only_after_the_last_micro_batch() -> None:
    records = traced(candidate("ddp", copies=2, accumulation=2))
    one = predict(candidate("ddp", copies=4, accumulation=8), records=records)
    assert one.communication_s == pytest.approx(2 * 0.75 * BLOCKS * PARAMETERS * 4 / 1e11)


def test_parts_of_another_micro_batch_are_not_taken_for_those_that_are_gone() -> None:
    def backward(last: bool, flops: float) -> TimelinePart:
        work = (TimelineLoad("aten.mm", "float32", 1.0, flops, moved_bytes=0.0, made_bytes=0.0),)
        paces = tuple(
            TimelinePace("backward", int(last), None, False, work, None) for _ in range(3)
        )
        return TimelinePart(
            phase="backward", block=None, last_micro_batch=last, times=1, paces=paces
        )

    step = [backward(False, 1.0 + number) for number in range(20)]
    step += [backward(True, 1000.0 + number) for number in range(20)]
    way = candidate("ddp", copies=4)
    spent = schedule.run_schedule(
        *(step, lambda pace: pace.work[0].flops),
        record=dataclasses.replace(traced(way)[0], parameters=()),
        candidate=way,
        hardware=hardware(),
        rates=RATES,
    )
    assert spent.step_s == 3 * (sum(range(1, 21)) + sum(range(1000, 1020)))


def test_fsdp_gathers_beside_the_block_before() -> None:
    # A gather takes 0.48 ms and a forward 1 ms: all but the first are hidden.
    one = predict(candidate("fsdp", shards=4))
    gather = 0.75 * 4 * PARAMETERS / 1e11
    assert one.communication_s == pytest.approx(3 * BLOCKS * gather)
    assert gather < one.exposed_s < 4 * gather


def test_copies_add_up_their_shards_beside_the_backward_over_their_own_links() -> None:
    hybrid = candidate("fsdp", copies=2, shards=2)
    shard = collective("all_reduce", 2 * PARAMETERS, between_copies=True)

    def with_copies(record: TraceRecord) -> TraceRecord:
        found: list[Stretch] = []
        for one in record.timeline:
            found.append(one)
            if one.collective is not None and one.collective.kind == "reduce_scatter":
                found.append(dataclasses.replace(one, collective=shard))
        return dataclasses.replace(record, timeline=tuple(found))

    records = [with_copies(one) for one in traced(hybrid)]
    fast, slow = Link(latency_s=0.0, bytes_s=1e12), Link(latency_s=0.0, bytes_s=1e10)
    near = dataclasses.replace(hardware(2, fast), machines=2, between=fast)
    far = dataclasses.replace(near, between=slow)
    hidden, seen = (predict(hybrid, on, records=records) for on in (near, far))
    added_up = 2 * 0.5 * 2 * PARAMETERS / 1e10
    assert seen.communication_s - hidden.communication_s == pytest.approx(
        BLOCKS * added_up * 0.99, rel=1e-6
    )
    assert hidden.exposed_s < seen.exposed_s < BLOCKS * added_up
    wider = dataclasses.replace(hybrid, layout=ShardLayout(copies=2, shards=4))
    four = predict(wider, dataclasses.replace(far, cards_per_machine=4), records=records)
    assert four.communication_s < seen.communication_s  # shards are half as long


def test_where_links_are_slower_than_computing_they_decide() -> None:
    one = predict(candidate("fsdp", shards=4), hardware(link=Link(latency_s=0.0, bytes_s=5e9)))
    assert one.step_s > one.communication_s
    assert one.exposed_s > 0.6 * one.communication_s


def test_on_the_cpu_every_collective_holds_its_rank_up() -> None:
    rates = dataclasses.replace(RATES, beside=False)
    one = predict(candidate("fsdp", shards=4), rates=rates)
    assert one.exposed_s == pytest.approx(one.communication_s)


def test_other_shards_than_were_traced_change_the_update_and_made_up_rows() -> None:
    records = traced(candidate("fsdp", shards=8))
    one = predict(candidate("fsdp", shards=16), hardware(16), records=records)
    traced_ones = predict(candidate("fsdp", shards=8), hardware(8), records=records)
    assert traced_ones.compute_s - one.compute_s == pytest.approx(BLOCKS * 1e-3 / 8 / 2, rel=1e-6)
    rows = PARAMETERS // 16
    many = predict(candidate("fsdp", shards=2 * rows), hardware(2 * rows), records=records)
    twice = 2 * rows - 1  # of the rows that each of them gathers, half are made up
    assert many.communication_s == pytest.approx(
        3 * BLOCKS * 2 * 4 * PARAMETERS * twice / (2 * rows) / 1e11
    )


def test_offload_pays_for_the_way_to_the_host_and_the_update_there() -> None:
    plain = predict(candidate("fsdp", shards=4))
    away = predict(candidate("fsdp", shards=4, cpu_offload=True))
    assert away.step_s > 2 * plain.step_s


def test_beginning_operations_takes_a_card_s_processor_time_only_where_it_is_longer() -> None:
    slow = dataclasses.replace(RATES, operation_s=1e-4)
    assert predict(candidate(), rates=slow).step_s == pytest.approx(0.04, rel=0.01)
    on_cpu = hardware(kind="cpu")
    assert predict(candidate(), on_cpu, rates=slow).step_s > predict(candidate(), on_cpu).step_s


def test_the_update_of_shards_begins_its_operations_by_another_way() -> None:
    on_cpu = hardware(kind="cpu")
    slow = dataclasses.replace(RATES, sharded_operation_s=1e-3)
    for wanted, longer_s in (
        (candidate("ddp", copies=4), 0.0),
        (candidate("fsdp", shards=4), 1e-3),  # its update is one operation
    ):
        longer = predict(wanted, on_cpu, rates=slow).step_s - predict(wanted, on_cpu).step_s
        assert longer == pytest.approx(longer_s)


@pytest.mark.parametrize(
    ("samples", "longer_s"),
    [(1, 0.0), (3, 0.0), (4, 40 * MiB / 1e9)],  # what a sample's results are: 10 MiB
)
def test_memory_for_large_results_is_handed_out_by_the_system_each_time(
    samples: int, longer_s: float
) -> None:
    records = [
        dataclasses.replace(
            one,
            timeline=tuple(
                dataclasses.replace(
                    stretch,
                    operations=tuple(
                        dataclasses.replace(
                            operation,
                            made_bytes=one.request.candidate.micro_batch_size * 10 * MiB,
                        )
                        for operation in stretch.operations
                    ),
                )
                if stretch.phase == "loss"
                else stretch
                for stretch in one.timeline
            ),
        )
        for one in traced(candidate())
    ]
    wanted = dataclasses.replace(candidate(), micro_batch_size=samples)
    anew = dataclasses.replace(RATES, new_memory_bytes_s=1e9)
    longer = predict(wanted, records=records, rates=anew).step_s
    assert longer - predict(wanted, records=records).step_s == pytest.approx(longer_s)


def test_operations_that_are_slower_than_memory_are_known_by_name() -> None:
    wanted = candidate()
    slow = dataclasses.replace(RATES, slow_operations={"aten.add_": 1e10})
    longer = predict(wanted, rates=slow).step_s - predict(wanted).step_s
    assert longer == pytest.approx(BLOCKS * 1e9 * (1e-10 - 1e-12))


def test_more_is_never_slower() -> None:
    ways = [candidate("ddp", copies=4), candidate("fsdp", shards=4)]
    for wanted in ways:
        for scale in (1.5, 10.0):
            base = predict(wanted)
            link = Link(latency_s=0.0, bytes_s=1e11 * scale)
            assert predict(wanted, hardware(link=link)).step_s <= base.step_s
            assert predict(wanted, hardware(flops={"float32": 1e12 * scale})).step_s <= base.step_s
            faster = hardware(bandwidth_bytes_s=1e12 * scale)
            assert predict(wanted, faster).step_s <= base.step_s


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_more_ranks_of_a_machine_never_train_fewer_samples(strategy: str) -> None:
    for bytes_s in (1e9, 1e10, 1e11, 1e12):
        speeds = []
        for ranks in (2, 3, 4, 8, 16):
            sharded = strategy == "fsdp"
            wanted = candidate(
                strategy, copies=1 if sharded else ranks, shards=ranks if sharded else 1
            )
            on = hardware(ranks, Link(latency_s=1e-6, bytes_s=bytes_s))
            speeds.append(predict(wanted, on).samples_per_s)
        assert speeds == sorted(speeds)


def test_a_card_without_figures_is_refused_with_what_is_missing(
    snapshot: SnapshotAssertion,
) -> None:
    with pytest.raises(Impossible) as caught:
        predict(candidate(), hardware(flops={}))
    assert caught.value == snapshot
    assert "--calibrate" in caught.value.fix
    with pytest.raises(Impossible) as caught:
        predict(candidate(), hardware(bandwidth_bytes_s=None))
    assert caught.value == snapshot


def test_a_ring_between_machines_uses_every_card_s_way_out() -> None:
    on = hardware_given.parse_hardware("4x8xH100")
    rates = dataclasses.replace(RATES, communication=1.0)

    def seconds(ranks: int, each: int, kind: str = "all_gather") -> float:
        group = LinkGroup(ranks=ranks, ranks_of_machine=each)
        return links.transfer_seconds(kind, 8e9, group, hardware=on, rates=rates)

    assert seconds(8, 8) == pytest.approx(7 / 8 * 8e9 / 450e9, rel=1e-2)
    assert seconds(32, 8) == pytest.approx(31 / 32 * 8e9 / 400e9, rel=1e-2)  # 8 x 50 GB/s
    assert seconds(4, 1) == pytest.approx(3 / 4 * 8e9 / 50e9, rel=1e-2)
    assert seconds(32, 8, "all_reduce") == pytest.approx(2 * seconds(32, 8), rel=1e-2)
    assert seconds(1, 1) == 0.0


def test_copies_of_shards_talk_across_machines_and_shards_within() -> None:
    on = hardware_given.parse_hardware("4x8xH100")
    hybrid = candidate("fsdp", copies=4, shards=8)
    gather, reduction = (
        collective("all_gather", 1),
        collective("all_reduce", 1, between_copies=True),
    )
    assert links.link_group(gather, hybrid, on) == LinkGroup(ranks=8, ranks_of_machine=8)
    assert links.link_group(reduction, hybrid, on) == LinkGroup(ranks=4, ranks_of_machine=1)
    everyone = links.link_group(collective("all_reduce", 1), hybrid, on)
    assert (everyone.ranks, everyone.machines) == (32, 4)


def test_a_measured_collective_is_taken_as_it_was_measured() -> None:
    rates = dataclasses.replace(
        RATES, collectives={rate_key("all_reduce", 2): Link(latency_s=1.0, bytes_s=10.0)}
    )
    group = LinkGroup(ranks=2, ranks_of_machine=2)
    assert links.transfer_seconds("all_reduce", 20, group, hardware=hardware(), rates=rates) == 3.0
    assert links.transfer_seconds("all_gather", 20, group, hardware=hardware(), rates=rates) < 1.0


def test_hours_and_money(snapshot: SnapshotAssertion) -> None:
    step = predict(candidate("ddp", copies=4))
    assert step.tokens_per_s is not None
    on = dataclasses.replace(hardware(), price_per_card_hour=2.0)
    found = forecast.forecast_cost(step, on, tokens=step.tokens_per_s * 7200)
    assert (found.hours, found.card_hours, found.price) == pytest.approx((2.0, 8.0, 16.0))
    assert forecast.forecast_cost(
        step, hardware(), samples=step.samples_per_s * 3600
    ).hours == pytest.approx(1)
    assert forecast.forecast_cost(step, hardware(), samples=1.0).price is None
    with pytest.raises(Impossible) as caught:
        forecast.forecast_cost(dataclasses.replace(step, tokens_per_s=None), on, tokens=1e9)
    assert caught.value == snapshot
