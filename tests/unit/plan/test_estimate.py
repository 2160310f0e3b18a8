"""What is computed from traces of a few blocks: memory with its band, and a rough time."""

from dataclasses import replace

import pytest

from made_up_plans import ONE, WORK, MadeUpModel, fsdp, hardware
from torchmuster.plan import estimate
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import Peak, TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

MODEL = MadeUpModel()


def records(candidate: Candidate) -> list[TraceRecord]:
    requests = estimate.trace_requests(WORK, candidate, kernels="cuda")
    return [MODEL.record(request) for request in requests]


def memory(candidate: Candidate, **on: int) -> estimate.Memory:
    return estimate.predict_memory(records(candidate), candidate, hardware=hardware(**on))


def time(candidate: Candidate, **on: int) -> estimate.StepTime:
    found = estimate.predict_time(records(candidate), candidate, hardware=hardware(**on))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "candidate",
    [fsdp(), fsdp(micro_batch_size=5), fsdp(64, recompute="full"), fsdp(512, micro_batch_size=20)],
)
def test_a_few_blocks_give_the_whole_model(candidate: Candidate) -> None:
    whole = MODEL.record(TraceRequest(work=WORK, candidate=candidate))
    machines = max(candidate.layout.ranks // 8, 1)
    assert memory(candidate, machines=machines).tensor_bytes == pytest.approx(
        whole.peak_bytes, rel=1e-6
    )


def test_few_traces_are_needed() -> None:
    assert len(estimate.trace_requests(WORK, fsdp(), kernels="cuda")) == 2
    assert len(estimate.trace_requests(WORK, fsdp(micro_batch_size=7), kernels="cuda")) == 2
    assert len(estimate.trace_requests(WORK, fsdp(micro_batch_size=99), kernels="cuda")) == 4


def test_where_every_n_th_block_is_recomputed_the_whole_model_is_traced() -> None:
    requests = estimate.trace_requests(WORK, fsdp(recompute=3), kernels="cuda")
    assert [request.blocks for request in requests] == [None]
    assert memory(fsdp(recompute=3)).tensor_bytes > 0


def test_the_band_is_around_a_constant_factor() -> None:
    expected, low, high = estimate.device_bytes(10 * GiB, hardware())
    assert expected == round(estimate.RESERVED * 10 * GiB)
    assert low >= 10 * GiB
    assert high / low <= 1.6 + 1e-9
    of_cpu = replace(hardware(), card=replace(hardware().card, kind="cpu"))
    assert estimate.device_bytes(10 * GiB, of_cpu)[0] == 10 * GiB


def test_the_inputs_of_later_micro_batches_wait_on_the_device() -> None:
    two, ten = (memory(fsdp(accumulation=count)).tensor_bytes for count in (2, 10))
    assert ten - two == 2 * 8 * 8192  # those of the step before wait, too


def test_states_are_sharded() -> None:
    record = MODEL.record(TraceRequest(work=WORK, candidate=fsdp()))
    assert estimate.states_bytes(record, fsdp()) == 16 * MODEL.parameters // 8
    assert estimate.states_bytes(record, fsdp(cpu_offload=True)) == 0
    kept = estimate.states_bytes(record, fsdp(reshard=False))
    assert kept == 16 * MODEL.parameters // 8 + 2 * MODEL.parameters


def test_offload_uses_the_host() -> None:
    offloaded = memory(fsdp(cpu_offload=True))
    assert offloaded.host_bytes == pytest.approx(16 * MODEL.parameters, rel=1e-6)
    assert offloaded.tensor_bytes < memory(fsdp()).tensor_bytes


def test_products_and_links_decide_the_time() -> None:
    once, twice = time(fsdp(micro_batch_size=2)), time(fsdp(micro_batch_size=4))
    assert 1.7 < twice.step_s / once.step_s <= 2.0
    assert time(fsdp(micro_batch_size=2, recompute="full")).step_s > 1.2 * once.step_s
    across = time(fsdp(16), machines=2)
    assert across.waiting_share > time(fsdp()).waiting_share


def test_accumulation_repeats_a_micro_batch() -> None:
    one, four = time(fsdp()), time(fsdp(accumulation=4))
    assert 3 * one.step_s < four.step_s < 4 * one.step_s


def test_unknown_rates_give_no_time() -> None:
    candidate = Candidate(strategy="single", layout=ONE)
    unknown = replace(hardware(), card=replace(hardware().card, bandwidth_bytes_s=None))
    assert estimate.predict_time(records(candidate), candidate, hardware=unknown) is None


def test_padding_rows_are_gathered() -> None:
    record = MODEL.record(TraceRequest(work=WORK, candidate=fsdp()))
    whole = estimate.shard_elements(record, 1)
    assert 8 * estimate.shard_elements(record, 8) == whole
    assert 8192 * 2 * estimate.shard_elements(record, 8192 * 2) == 2 * whole


def test_a_stage_of_one_depth_only_can_be_the_peak() -> None:
    candidate = fsdp()
    fewer, more = records(candidate)
    update = Peak(
        phase="check",
        micro_batch=0,
        block=None,
        peak_bytes=10**12,
        by_category={"optimizer": 10**12},
    )
    more = replace(more, peaks=(*more.peaks, update))
    found = estimate.predict_memory([fewer, more], candidate, hardware=hardware())
    assert (found.tensor_bytes, found.peak_at) == (10**12, "check")


def test_the_band_includes_that_of_what_is_outside_of_the_allocator() -> None:
    found = memory(fsdp())
    _, low, high = estimate.device_bytes(found.tensor_bytes, hardware())
    outside = sum(term.size_bytes for term in found.outside)
    assert found.low_bytes - low == round(outside / 2)
    assert found.high_bytes - high == 2 * outside


def test_groups_have_buffers_outside_of_the_allocator() -> None:
    hybrid = Candidate(strategy="fsdp", layout=ShardLayout(copies=2, shards=8))
    names = [term.name for term in memory(hybrid, machines=2).outside]
    assert [name for name in names if "NCCL" in name] == [
        "NCCL, a group of 16",
        "NCCL, a group of 8",
        "NCCL, a group of 2",
    ]
