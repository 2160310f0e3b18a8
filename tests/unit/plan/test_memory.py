"""Memory of any depth, micro-batch and number of shards, from records that were made up."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.finding import Status
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory import log_depth, shard_degree
from torchmuster.plan.memory.forecast import traced_sizes
from torchmuster.plan.record import Allocation, Peak, Shape, TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB, MiB

LINK = Link(latency_s=1e-6, bytes_s=1e11)
WORK = Work(build="made_up:model")
ROWS, COLUMNS, REST = 4096, 4096, 32000


def machine(kind: str = "cuda", name: str = "H100") -> Hardware:
    card = Gpu(name=name, memory_bytes=80 * GiB, flops={}, bandwidth_bytes_s=1e12, kind=kind)
    return Hardware(card=card, machines=4, cards_per_machine=8, within=LINK, between=LINK)


def candidate(
    strategy: str = "fsdp", copies: int = 1, shards: int = 8, **more: object
) -> Candidate:
    layout = ShardLayout(copies=copies, shards=shards)
    return Candidate(strategy=strategy, layout=layout, **more)  # type: ignore[arg-type]


def shapes(blocks: int) -> tuple[Shape, ...]:
    def shape(name: str, size: tuple[int, ...], block: int | None) -> Shape:
        return Shape(name=name, shape=size, dtype="float32", trained=True, block=block)

    return (
        shape("embedding", (REST, COLUMNS), None),
        *(shape(f"blocks.{one}.weight", (ROWS, COLUMNS), one) for one in range(blocks)),
    )


def true_peaks(blocks: int, size: int, shards: int) -> tuple[Peak, ...]:
    """Peaks of a model that was thought out: states, what is gathered, and what samples take.

    The embedding is gathered throughout, and a block while it is computed; both by whole rows.
    """
    own = [math.ceil(shape.shape[0] / shards) * COLUMNS * 4 for shape in shapes(blocks)]
    states = 3 * sum(own)
    gathered = shards * math.ceil(ROWS / shards) * COLUMNS * 2
    throughout = shards * math.ceil(REST / shards) * COLUMNS * 2
    of_sample = 50 * MiB

    def peak(phase: str, block: int | None, activations: int, gradients: int, other: int) -> Peak:
        categories = {
            "parameters": sum(own),
            "optimizer": 2 * sum(own),
            "gradients": gradients,
            "activations": activations,
            "collectives": other,
        }
        return Peak(
            phase=phase,  # type: ignore[arg-type]
            micro_batch=0,
            block=block,
            after_block=None,
            peak_bytes=states + activations + gradients + other,
            by_category=categories,
            operation=f"aten.{phase}",
            module="",
        )

    forward = [
        peak("forward", one, (one + 1) * size * of_sample, 0, throughout + gathered)
        for one in range(blocks)
    ]
    backward = [
        peak(
            "backward",
            one,
            (one + 1) * size * of_sample,
            (blocks - one) * own[1],
            throughout + 3 * gathered,
        )
        for one in reversed(range(blocks))
    ]
    loss = peak("loss", None, blocks * size * of_sample + size * 20 * MiB, 0, throughout)
    return (*forward, loss, *backward, peak("update", None, size * MiB, sum(own), 0))


def traced(request: TraceRequest, *, whole: int = 32, log: str | None = None) -> TraceRecord:
    blocks = min(request.blocks or whole, whole)
    shards = request.candidate.layout.shards
    size = request.candidate.micro_batch_size
    parameters = shapes(blocks)
    own = sum(math.ceil(one.shape[0] / shards) * one.shape[1] * 4 for one in parameters)
    return TraceRecord(
        request=request,
        torch="2.13",
        blocks_traced=blocks,
        blocks=whole,
        blocks_alike=True,
        parameters=parameters,
        parameter_count=(whole * ROWS + REST) * COLUMNS,
        trained_count=(whole * ROWS + REST) * COLUMNS,
        samples_per_micro_batch=size,
        tokens_per_sample=None,
        states={"parameters": own, "gradients": own, "optimizer": 2 * own, "buffers": 0},
        first_step_peak_bytes=1,
        peaks=true_peaks(blocks, size, shards),
        timeline=(),
        host_bytes=4 * own if request.candidate.cpu_offload else 0,
        log=log,
    )


def predicted(one: Candidate, *, whole: int = 32, on: Hardware | None = None) -> memory.Memory:
    records = [
        traced(each, whole=whole) for each in memory.trace_requests(WORK, one, kernels="cuda")
    ]
    return memory.predict_memory(records, one, hardware=on or machine())


def test_what_is_traced_for_a_candidate() -> None:
    asked = memory.trace_requests(
        WORK,
        candidate(copies=16, shards=512, micro_batch_size=7, accumulation=5),
        kernels="cuda",
    )
    found = [(one.blocks, one.candidate.micro_batch_size, one.candidate.layout) for one in asked]
    few, many = ShardLayout(copies=2, shards=8), ShardLayout(copies=2, shards=64)
    assert found == [(3, 2, few), (3, 3, few), (4, 2, few), (4, 3, few), (3, 2, many), (4, 2, many)]
    assert {one.candidate.accumulation for one in asked} == {2}
    assert not any(one.keep_log for one in asked)


def test_fewer_traces_do_for_one_sample_and_one_machine() -> None:
    asked = memory.trace_requests(WORK, candidate(shards=4), kernels="cpu")
    assert [(one.blocks, one.candidate.micro_batch_size) for one in asked] == [(3, 1), (4, 1)]
    assert {one.candidate.layout for one in asked} == {ShardLayout(copies=1, shards=4)}


def test_a_log_is_traced_with_the_candidates_own_size() -> None:
    asked = memory.trace_requests(
        WORK, candidate(micro_batch_size=7, recompute=2), kernels="cuda", keep_log=True
    )
    found = [(one.blocks, one.candidate.micro_batch_size, one.keep_log) for one in asked]
    assert found == [(6, 7, True), (8, 7, True)]


def test_a_few_shards_that_divide_no_rows_are_traced_themselves() -> None:
    for shards in (12, 24, 63):
        asked = memory.trace_requests(WORK, candidate(shards=shards), kernels="cuda")
        assert {one.candidate.layout.shards for one in asked} == {shards}
    for shards in (16, 32, 64, 96, 1000):
        asked = memory.trace_requests(WORK, candidate(shards=shards), kernels="cuda")
        assert {one.candidate.layout.shards for one in asked} == {8, 64}


def test_candidates_of_one_family_share_their_traces() -> None:
    one = candidate(copies=4, shards=16, micro_batch_size=4, accumulation=2)
    two = candidate(copies=64, shards=1024, micro_batch_size=9, accumulation=8)
    assert memory.trace_family(one, WORK) == memory.trace_family(two, WORK)
    for other in (
        replace(one, recompute="full"),
        replace(one, accumulation=1),
        replace(one, micro_batch_size=1),
        replace(one, layout=ShardLayout(copies=1, shards=16)),
    ):
        assert memory.trace_family(other, WORK) != memory.trace_family(one, WORK)


def test_more_is_traced_where_the_recomputed_blocks_do_not_divide_the_model() -> None:
    one = candidate(recompute=3)
    asked = memory.trace_requests(WORK, one, kernels="cpu")
    records = [traced(each, whole=32) for each in asked]
    more = memory.further_requests(records)
    assert [each.blocks for each in more] == [11, 14]
    assert memory.further_requests([*records, *(traced(each, whole=32) for each in more)]) == []
    assert memory.further_requests([traced(each, whole=30) for each in asked]) == []


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 130),
    size=st.integers(1, 200),
    shards=st.integers(1, 6000),
)
def test_every_shape_is_computed_as_it_is(blocks: int, size: int, shards: int) -> None:
    one = candidate(shards=shards, micro_batch_size=size)
    found = predicted(one, whole=blocks)
    peaks = true_peaks(blocks, size, shards)
    truth = max(peak.peak_bytes for peak in peaks)
    # What is left of a gradient's made-up rows is known on average only.
    assert found.tensor_bytes == pytest.approx(truth, rel=2e-4 if shards > 64 else 1e-9)
    assert sum(found.by_category.values()) == pytest.approx(found.tensor_bytes, abs=8)


def test_the_place_of_the_peak_is_that_of_the_whole_model() -> None:
    found = predicted(candidate(micro_batch_size=1))
    assert found.where is not None
    assert (found.where.phase, found.where.block, found.where.operation) == (
        "backward",
        31,
        "aten.backward",
    )
    many = predicted(candidate(micro_batch_size=40))
    assert many.where is not None
    assert many.where.phase == "loss"


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 100), blocks=st.integers(1, 90), shards=st.integers(1, 5000))
def test_more_samples_never_take_less(size: int, blocks: int, shards: int) -> None:
    one = candidate(shards=shards, micro_batch_size=size)
    more = replace(one, micro_batch_size=size + 1)
    assert predicted(more, whole=blocks).tensor_bytes >= predicted(one, whole=blocks).tensor_bytes


@given(shards=st.integers(1, 20000), blocks=st.integers(1, 200))
def test_more_shards_never_keep_more(shards: int, blocks: int) -> None:
    parameters = shapes(3)
    fewer = shard_degree.shard_elements(parameters, shards, blocks=blocks)
    assert shard_degree.shard_elements(parameters, shards + 1, blocks=blocks) <= fewer


def test_a_micro_batch_of_another_size_needs_two_traces(snapshot: SnapshotAssertion) -> None:
    one = candidate()
    records = [traced(each) for each in memory.trace_requests(WORK, one, kernels="cpu")]
    with pytest.raises(Impossible) as caught:
        memory.predict_memory(records, replace(one, micro_batch_size=4), hardware=machine())
    assert caught.value == snapshot


def test_a_trace_that_disagrees_is_told(snapshot: SnapshotAssertion) -> None:
    one = candidate(micro_batch_size=4)
    records = [traced(each) for each in memory.trace_requests(WORK, one, kernels="cuda")]
    asked = memory.check_request(records)
    assert asked is not None
    assert (asked.blocks, asked.candidate.micro_batch_size) == (5, 6)
    agreeing = traced(asked)
    memory.check_records(records, agreeing)
    higher = tuple(
        replace(peak, peak_bytes=round(peak.peak_bytes * 1.01)) for peak in agreeing.peaks
    )
    with pytest.raises(Impossible, match=r"1\.0%") as caught:
        memory.check_records(records, replace(agreeing, peaks=higher))
    assert "muster plan --verify" in caught.value.fix
    assert caught.value == snapshot


def test_inputs_of_all_micro_batches_of_a_step_stay() -> None:
    one = candidate(micro_batch_size=4, accumulation=2)
    more = replace(one, accumulation=12)
    # In the made-up model 1 MiB a sample is there at the update, with two micro-batches: half of it for each.
    waiting = predicted(more).tensor_bytes - predicted(one).tensor_bytes
    assert waiting == 10 * 4 * MiB // 2
    # Where each size is traced itself, one of them tells the same.
    asked = memory.trace_requests(WORK, more, kernels="cpu")
    alone, all_of_them = (
        memory.predict_memory(
            [
                traced(replace(each, candidate=replace(each.candidate, accumulation=2)))
                for each in asked
            ],
            each_step,
            hardware=machine("cpu", "CPU"),
        )
        for each_step in (one, more)
    )
    assert all_of_them.tensor_bytes - alone.tensor_bytes == waiting


def test_what_is_beside_the_tensors(snapshot: SnapshotAssertion) -> None:
    found = predicted(candidate(copies=2, shards=8))
    assert [term.name for term in found.outside] == [
        "CUDA context",
        "cuBLAS workspaces",
        "NCCL, a group of 16",
        "NCCL, a group of 8",
        "NCCL, a group of 2",
    ]
    assert all(term.source for term in found.outside)
    assert found.reserved_bytes is None
    assert found.low_bytes < found.total_bytes < found.high_bytes
    assert found.origin == snapshot
    one = predicted(candidate("single", shards=1))
    assert [term.name for term in one.outside] == ["CUDA context", "cuBLAS workspaces"]


def test_a_cpu_keeps_nothing_for_later(snapshot: SnapshotAssertion) -> None:
    found = predicted(candidate("ddp", copies=4, shards=1), on=machine("cpu", "CPU"))
    assert found.total_bytes == found.tensor_bytes + 350 * MiB
    assert found.origin == snapshot


def test_what_a_save_takes() -> None:
    found = predicted(candidate(copies=1, shards=16))
    whole = 3 * 4 * (32 * ROWS + REST) * COLUMNS  # a weight and two averages, each four bytes
    assert found.save_bytes == whole
    assert found.save_host_bytes == whole // 2  # eight of sixteen ranks
    frozen = replace(WORK, optimizer="sgd")
    records = [traced(one) for one in memory.trace_requests(frozen, candidate(), kernels="cuda")]
    assert (
        memory.predict_memory(records, candidate(), hardware=machine()).save_bytes == whole * 2 // 3
    )


def test_what_is_offloaded_is_in_the_memory_of_the_machine() -> None:
    found = predicted(candidate(shards=32, cpu_offload=True))
    assert found.host_bytes == 8 * 4 * 4 * (32 * ROWS + REST) * COLUMNS // 32


def test_shards_beyond_the_rows_are_told(snapshot: SnapshotAssertion) -> None:
    record = traced(memory.trace_requests(WORK, candidate(), kernels="cuda")[0])
    assert shard_degree.degree_findings(record, shards=4096) == []
    [found] = shard_degree.degree_findings(record, shards=16384)
    assert found.status is Status.WARNING
    assert "4.00" in found.what
    assert "fsdp_sharding_strategy: hybrid_shard" in found.fix
    assert found == snapshot


def take(number: int, size: int) -> Allocation:
    return Allocation(kind="take", number=number, size_bytes=size)


def give(number: int) -> Allocation:
    return Allocation(kind="give", number=number)


def written(events: list[Allocation], place: Path) -> str:
    import msgspec

    place.write_bytes(b"\n".join(map(msgspec.json.encode, events)))
    return str(place)


def log_of(blocks: int) -> list[Allocation]:
    """The log of a model that takes 30 MiB for each block, and gives them back in the other order."""
    numbers = range(1, blocks + 1)
    return [
        Allocation(kind="mark", mark="step 0"),
        take(0, 50 * MiB),
        *(take(number, 30 * MiB) for number in numbers),
        Allocation(kind="mark", mark="backward 0"),
        *(
            event
            for number in reversed(numbers)
            for event in (take(99, 20 * MiB), give(number), give(99))
        ),
        give(0),
    ]


def test_what_the_allocator_keeps_is_simulated_over_the_logs(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    one = candidate(shards=4)
    asked = memory.trace_requests(WORK, one, kernels="cuda", keep_log=True)
    records = [
        traced(each, log=written(log_of(each.blocks or 0), tmp_path / f"{each.blocks}"))
        for each in asked
    ]
    found = memory.predict_memory(records, one, hardware=machine(), allocator="classic")
    assert found.reserved_bytes == (50 + 32 * 30 + 20) * MiB
    assert found.origin == snapshot
    usual = memory.predict_memory(
        records, one, hardware=machine()
    )  # as muster train has it on CUDA
    assert usual.origin.endswith(", with expandable segments")
    Path(str(records[0].log)).unlink()
    assert memory.predict_memory(records, one, hardware=machine()).reserved_bytes is None


def test_made_up_rows_are_in_the_allocations(tmp_path: Path) -> None:
    one = candidate(shards=6000)  # each rank has a row of the block, and six of the embedding
    row = COLUMNS * 4

    def log(request: TraceRequest) -> str:
        shards, blocks = request.candidate.layout.shards, request.blocks or 0
        rows = [math.ceil(each.shape[0] / shards) for each in shapes(blocks)]
        events = [
            Allocation(kind="mark", mark="step 0"),
            *(take(number, each * row) for number, each in enumerate(rows)),
            take(100, 4096 * row),  # of samples, with a block's size
            *(
                replace(take(number, shards * rows[at] * row), category="collectives")
                for number, at in ((101, 0), (102, 1))
            ),
        ]
        return written(events, tmp_path / f"{blocks} blocks, {shards} shards")

    asked = memory.trace_requests(WORK, one, kernels="cuda", keep_log=True)
    records = [traced(each, log=log(each)) for each in asked]
    [embedding, block] = (math.ceil(each / 6000) * 6000 * row for each in (REST, ROWS))
    made = log_depth.log_of_depth(records, blocks=32, shards=6000)
    assert [each.size_bytes for each in made if each.kind == "take"] == [
        6 * row,
        *(row for _ in range(32)),
        4096 * row,
        embedding,
        block,
    ]


def folder_with(config: Mapping[str, object], folder: Path) -> Work:
    (folder / "config.json").write_text(json.dumps(config))
    return Work(model_name_or_path=str(folder), sequence_length=1000)


def test_sizes_are_traced_on_the_same_side_of_each_border(tmp_path: Path) -> None:
    # 2**24 logits are 5592 tokens of 3000 words: five samples.
    work = folder_with({"vocab_size": 3000}, tmp_path)
    found = {size: traced_sizes(work, size, kernels="cuda") for size in (1, 2, 5, 6, 100)}
    assert found == {1: (1,), 2: (2, 3), 5: (2, 3), 6: (6, 7), 100: (6, 7)}
    large = folder_with({"vocab_size": 128000}, tmp_path)
    assert traced_sizes(large, 9, kernels="cuda") == (2, 3)
    assert traced_sizes(replace(large, loss="cross_entropy"), 9, kernels="cuda") == (2, 3)
    unknown = Work(build="a:b", loss="language_model", sequence_length=10)
    found = {size: traced_sizes(unknown, size, kernels="cuda") for size in (2, 8, 11)}
    assert found == {2: (2,), 8: (8,), 11: (8, 16)}


def test_on_a_cpu_each_size_is_traced_itself() -> None:
    assert traced_sizes(WORK, 12, kernels="cpu") == (12,)
    asked = memory.trace_requests(WORK, candidate(micro_batch_size=12), kernels="cpu")
    assert [(one.blocks, one.candidate.micro_batch_size) for one in asked] == [(3, 12), (4, 12)]
