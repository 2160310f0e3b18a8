"""A traced training takes what a real one takes, and says where; what cannot be followed is refused by name."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
import torch.distributed as dist
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, MusterError
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.real_steps import real_steps
from torchmuster.plan.probes.trace import answer, trace
from torchmuster.plan.proof.verification import RealSteps
from torchmuster.plan.record import Allocation, TracedCollective, TraceRecord, TraceRequest
from torchmuster.plan.torch_private import single_allocations
from torchmuster.train.strategies.sharding import ShardLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers"), pytest.mark.slow]

KERNELS: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
ALONE = ShardLayout(copies=1, shards=1)
MODELS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class Block(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.norm, self.wide, self.back = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.reads = reads

    def forward(self, x):
        if self.reads and x.sum().item() > 0:
            x = x + 1
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))

class Model(nn.Module):
    def __init__(self, blocks=5, reads=False):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.running = nn.BatchNorm1d(16)
        self.blocks = nn.Sequential(*(Block(reads and n == 2) for n in range(blocks)))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        print("a model may print")
        return self.last(self.blocks(self.first(self.running(x))))

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3))
        )

    def forward(self, x):
        return self.blocks(x)

class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 4000))

    def forward(self, x):
        return x @ self.weight + x.relu() @ self.weight

class Tied(nn.Module):
    def __init__(self, spare=False):
        super().__init__()
        self.first, self.last = nn.Linear(16, 4000, bias=False), nn.Linear(16, 4000, bias=False)
        self.last.weight = self.first.weight
        if spare:
            self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.last(self.first(x.to(self.first.weight.dtype))[:, :16])

def used_twice():
    return UsedTwice()

def normed():
    return Normed()

def tied():
    return Tied()

def with_spare():
    return Tied(spare=True)

def make():
    return Model()

def reads_values():
    return Model(reads=True)

def samples():
    return [(torch.zeros(16), 3)]
"""


@pytest.fixture
def own(tmp_path: Path) -> Work:
    """Return a model of the user's with a dataset."""
    name = f"models_{tmp_path.name.replace('-', '_')}"  # Python keeps modules by their names
    (tmp_path / f"{name}.py").write_text(MODELS)
    return Work(build=f"{name}:make", dataset=f"{name}:samples", folder=str(tmp_path))


@pytest.fixture
def llama(tmp_path: Path) -> Work:
    """Return a small model of transformers."""
    pytest.importorskip("transformers")
    (tmp_path / "llama").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return Work(model_name_or_path="llama", sequence_length=32, folder=str(tmp_path))


def replaced_for_a_while() -> tuple[object, ...]:
    return (
        torch.UntypedStorage.resize_,
        torch.get_rng_state,
        torch.rms_norm,
        torch.nn.Module._apply,
        functional.scaled_dot_product_attention,
        functional.dropout,
    )


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """See that nothing of an imagined world is left."""
    before = replaced_for_a_while()
    yield
    assert not dist.is_initialized()
    assert replaced_for_a_while() == before
    assert type(torch.zeros(1)) is torch.Tensor


def real_peak(work: Work, candidate: Candidate) -> int:
    """Return the most that is alive in a real step, of those that are alike."""
    steps = RealSteps(work=work, candidate=candidate, device="cpu", timed=0)
    return real_steps(steps, made_up_world()).peaks_bytes[-1]


def single(**more: Any) -> Candidate:
    return Candidate(strategy="single", layout=ALONE, **more)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_the_peak_is_that_of_a_real_step(llama: Work, own: Work) -> None:
    recomputed = single(micro_batch_size=4, accumulation=2, precision="bf16", recompute="selective")
    for work, candidate in (
        (llama, single(micro_batch_size=8, precision="bf16")),
        (replace(llama, clip_norm=1.0), recomputed),
        (replace(own, optimizer="sgd"), single(micro_batch_size=64, recompute="full")),
    ):
        found = trace(TraceRequest(work=work, candidate=candidate)).peak_bytes
        assert found == pytest.approx(real_peak(work, candidate), abs=64), (work, candidate)


def built_by(name: str, own: Work, **more: Any) -> Work:
    return replace(own, build=str(own.build).replace("make", name), **more)


def test_batch_normalization_of_what_autocast_made_is_followed(own: Work) -> None:
    work, candidate = built_by("normed", own), single(micro_batch_size=32, precision="bf16")
    found = trace(TraceRequest(work=work, candidate=candidate)).peak_bytes
    assert found == pytest.approx(real_peak(work, candidate), abs=64)
    trace(TraceRequest(work=work, candidate=candidate, kernels="cuda"))


def test_what_is_tied_stays_so_in_another_type(own: Work) -> None:
    work = built_by("tied", own, torch_dtype="bfloat16")
    record = trace(TraceRequest(work=work, candidate=single()))
    assert record.states["parameters"] == record.states["gradients"] == 16 * 4000 * 2
    assert record.parameter_count == 16 * 4000


def weights_taken_by_real_backward(output: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many times a weight's size is taken, where no mode looks on: that changes how gradients are added up."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        output.sum().backward()  # type: ignore[no-untyped-call]
    return max(accumulate(single_allocations(seen))) // (weight.numel() * weight.itemsize)


def test_a_gradient_is_added_to_where_it_lies_unless_it_is_a_view(own: Work) -> None:
    x, weight = torch.zeros(1, 16), torch.zeros(16, 4000, requires_grad=True)
    transposed = weight.detach().T.contiguous().requires_grad_()
    used = x @ weight + x.relu() @ weight
    tied = functional.linear(functional.linear(x, transposed)[:, :16], transposed)
    expected = {
        "used_twice": weights_taken_by_real_backward(used, weight),
        "tied": weights_taken_by_real_backward(tied, transposed),
    }
    assert expected == {"used_twice": 2, "tied": 3}
    for name, times in expected.items():
        for kernels in KERNELS:
            work = built_by(name, own, optimizer="sgd")
            record = trace(TraceRequest(work=work, candidate=single(), kernels=kernels))
            largest = max(one.peak_bytes for one in record.peaks if one.phase == "backward")
            gradients = largest - record.states["parameters"] - record.states["optimizer"]
            assert gradients // record.states["parameters"] == times, (name, kernels)


def test_parameters_that_ddp_would_wait_for_are_named(
    own: Work, snapshot: SnapshotAssertion
) -> None:
    candidate = Candidate(strategy="ddp", layout=ShardLayout(copies=4, shards=1))
    with pytest.raises(MusterError) as caught:
        trace(TraceRequest(work=built_by("with_spare", own), candidate=candidate))
    assert caught.value.what.endswith(": spare")
    assert caught.value.what == snapshot


@pytest.mark.nightly
def test_packed_rows_take_the_masks_that_they_need(llama: Work) -> None:
    candidate = single(micro_batch_size=8)
    packed = replace(llama, packed=True)
    found = trace(TraceRequest(work=packed, candidate=candidate)).peak_bytes
    assert found == pytest.approx(real_peak(packed, candidate), abs=64)
    assert found > trace(TraceRequest(work=llama, candidate=candidate)).peak_bytes


def fsdp(copies: int, shards: int, **more: Any) -> Candidate:
    return Candidate(
        strategy="fsdp",
        layout=ShardLayout(copies=copies, shards=shards),
        micro_batch_size=2,
        **more,
    )


def collectives(record: TraceRecord) -> list[TracedCollective]:
    return [one.collective for one in record.timeline if one.collective is not None]


@pytest.mark.nightly
def test_ranks_that_do_not_exist_share_the_states(llama: Work) -> None:
    alone = trace(TraceRequest(work=llama, candidate=single(), blocks=3))
    record = trace(TraceRequest(work=llama, candidate=fsdp(1, 8), blocks=3))
    assert record.blocks_traced == 3
    assert record.blocks == 4
    assert record.blocks_alike
    assert alone.states["parameters"] == alone.states["gradients"]
    # 300 rows of the vocabulary are no multiple of 8: rank 0 has 38 of them, twice
    padding = 2 * (38 * 8 - 300) * 64 * 4
    for name in ("parameters", "gradients"):
        assert record.states[name] == (alone.states[name] + padding) // 8
    per_block = [one for one in collectives(record) if one.kind == "all_gather"]
    assert len(per_block) == 1 + 3 + 3  # the rest once, each block in forward and backward
    reduced = [one for one in collectives(record) if one.kind == "reduce_scatter"]
    assert len(reduced) == 1 + 3
    assert {one.ranks for one in (*per_block, *reduced)} == {8}
    assert not any(one.between_copies for one in collectives(record))
    # gloo gathers and scatters by way of a copy
    assert any(one.operation.startswith("c10d.") for one in record.peaks)
    assert sum(one.moved_bytes for one in reduced) == 8 * record.states["gradients"]
    assert record.parameter_count == sum(
        torch.Size(one.shape).numel() * (one.copies if one.block == 0 else 1)
        for one in record.parameters
        if one.block in (None, 0)
    )


@pytest.mark.nightly
def test_copies_reduce_among_themselves_in_the_last_micro_batch_alone(llama: Work) -> None:
    record = trace(TraceRequest(work=llama, candidate=fsdp(4, 2, accumulation=2)))
    between = [
        one
        for one in record.timeline
        if one.collective is not None and one.collective.between_copies
    ]
    assert {(one.collective and one.collective.ranks, one.micro_batch) for one in between} == {
        (4, 1)
    }
    assert len(between) == 1 + 4
    scattered = [one for one in collectives(record) if one.kind == "reduce_scatter"]
    assert len(scattered) == 2 * (1 + 4)


def test_ddp_keeps_its_gradients_and_reduces_all_of_them_once(llama: Work) -> None:
    candidate = Candidate(strategy="ddp", layout=ShardLayout(copies=4, shards=1), accumulation=2)
    record = trace(TraceRequest(work=llama, candidate=candidate))
    reduced = [
        one for one in collectives(record) if (one.kind, one.dtype) == ("all_reduce", "float32")
    ]
    assert sum(one.moved_bytes for one in reduced) == record.states["gradients"]
    assert {one.ranks for one in reduced} == {4}
    before = record.peaks[0]
    assert before.phase == "forward"
    assert before.by_category["gradients"] == record.states["gradients"], "buckets stay"
    # The first micro-batch's are there beside the buckets, until the second's are.
    ends = [peak.by_category for peak in record.peaks if peak.phase == "backward"]
    assert ends[0]["gradients"] > record.states["gradients"]
    assert max(one["gradients"] for one in ends) == 2 * record.states["gradients"]
    assert all(one.get("temporaries", 0) < record.states["gradients"] / 4 for one in ends)


@pytest.mark.nightly
def test_peaks_are_told_by_phase_and_block_with_what_they_are_made_of(llama: Work) -> None:
    candidate = single(micro_batch_size=8, recompute="full")
    record = trace(TraceRequest(work=llama, candidate=candidate))
    places = [(one.phase, one.block) for one in record.peaks]
    for phase, order in (("forward", range(4)), ("backward", reversed(range(4)))):
        assert [block for name, block in places if name == phase and block is not None] == list(
            order
        )
    for peak in record.peaks:
        assert sum(peak.by_category.values()) == peak.peak_bytes
        assert peak.by_category["parameters"] >= record.states["parameters"]
        assert peak.by_category["optimizer"] == record.states["optimizer"]
    by_phase = {one.phase: one for one in record.peaks}
    assert by_phase["loss"].by_category["logits"] >= 8 * 32 * 300 * 4
    assert by_phase["update"].by_category["gradients"] == record.states["gradients"]
    inner = next(one for one in record.peaks if (one.phase, one.block) == ("forward", 2))
    assert inner.module.startswith("model.layers.2")
    again = [one for one in record.timeline if one.recomputed]
    assert {one.block for one in again} == {0, 1, 2, 3}
    forward = [one for one in record.timeline if one.phase == "forward" and one.block == 1]
    flops = [sum(one.flops for s in part for one in s.operations) for part in (forward, again)]
    last_product = 2 * 8 * 32 * 160 * 64  # its result is not needed, so torch stops before it
    assert flops[1] == 4 * (flops[0] - last_product)


def test_flops_are_those_of_the_matrix_products(own: Work) -> None:
    candidate = single(micro_batch_size=8)
    record = trace(TraceRequest(work=own, candidate=candidate))
    products = 16 * 64 + 5 * 2 * 64 * 256 + 64 * 10
    forward = [one for one in record.timeline if one.phase == "forward"]
    assert sum(one.flops for part in forward for one in part.operations) == 2 * 8 * products
    backward = [one for one in record.timeline if one.phase == "backward"]
    assert sum(one.flops for part in backward for one in part.operations) == 4 * 8 * products


def test_cuda_fuses_norms_and_no_optimizer_takes_room_for_all_parameters(own: Work) -> None:
    candidate = single(micro_batch_size=64)
    cpu, cuda = (
        trace(TraceRequest(work=own, candidate=candidate, kernels=kernels)) for kernels in KERNELS
    )
    peaks = [
        {one.phase: one for one in record.peaks}["loss"].by_category["activations"]
        for record in (cpu, cuda)
    ]
    assert peaks[1] < peaks[0]
    updating = [
        next(one for one in record.peaks if one.phase == "update") for record in (cpu, cuda)
    ]
    assert updating[1].by_category["temporaries"] < cuda.states["parameters"]
    assert updating[0].by_category["temporaries"] < cpu.states["parameters"]


@pytest.mark.nightly
def test_cuda_drops_out_in_one_operation_and_within_attention(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "gpt2").mkdir()
    config = {
        "model_type": "gpt2",
        "vocab_size": 500,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    }
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    work = Work(model_name_or_path="gpt2", sequence_length=128, folder=str(tmp_path))
    cpu, cuda = (
        trace(TraceRequest(work=work, candidate=single(precision="bf16"), kernels=kernels))
        for kernels in KERNELS
    )
    on_cpu, on_cuda = (
        {one.name for part in record.timeline if part.block is not None for one in part.operations}
        for record in (cpu, cuda)
    )
    by_pairs_of_tokens = {"aten.bmm", "aten.bernoulli_"}
    assert by_pairs_of_tokens <= on_cpu
    assert not by_pairs_of_tokens & on_cuda
    assert "aten.native_dropout" in on_cuda
    pairs = 2 * 4 * 128 * 128  # of tokens, in all blocks and heads: the CPU keeps 13 bytes for each
    assert cpu.peak_bytes - cuda.peak_bytes > 8 * pairs


@pytest.mark.nightly
def test_what_is_offloaded_is_the_hosts(llama: Work) -> None:
    kept, offloaded = (
        trace(TraceRequest(work=llama, candidate=fsdp(1, 2, cpu_offload=offload), kernels="cuda"))
        for offload in (False, True)
    )
    assert kept.host_bytes == 0
    assert offloaded.host_bytes == sum(
        offloaded.states[name] for name in ("parameters", "gradients", "optimizer")
    )
    spared = kept.states["parameters"] + kept.states["optimizer"]
    assert kept.peak_bytes - offloaded.peak_bytes >= spared - 4096


@pytest.mark.nightly
def test_the_log_gives_back_what_it_takes_and_knows_streams(llama: Work, tmp_path: Path) -> None:
    request = TraceRequest(work=llama, candidate=fsdp(1, 2), keep_log=True, kernels="cuda")
    record = trace(request, logs=tmp_path / "logs")
    assert record.log is not None
    assert trace(request, logs=tmp_path / "logs").log != record.log, "a log is never written over"
    lines = Path(record.log).read_bytes().splitlines()
    events = [msgspec.json.decode(line, type=Allocation) for line in lines]
    marks = [one.mark for one in events if one.kind == "mark"]
    assert "step 0" in marks
    assert "forward 0 3" in marks
    live, highest, held = 0, 0, dict[int, int]()
    for one in events[events.index(next(e for e in events if e.mark == "step 1")) :]:
        assert one.kind != "take" or one.size_bytes > 0
    for one in events:
        if one.kind == "take":
            assert one.number not in held
            held[one.number] = one.size_bytes
            live += one.size_bytes
        elif one.kind == "give":
            assert held.pop(one.number) == one.size_bytes
            live -= one.size_bytes
        highest = max(highest, live)
    # The first step has no states of the optimizer yet, so it never needs more.
    assert highest == record.peak_bytes >= record.first_step_peak_bytes
    assert {one.stream for one in events} == {"compute", "gather", "reduce"}


def test_what_reads_values_is_refused_by_name(own: Work, snapshot: SnapshotAssertion) -> None:
    work = built_by("reads_values", own)
    candidate = single(micro_batch_size=2)
    request = TraceRequest(work=work, candidate=candidate)
    with pytest.raises(Impossible) as caught:
        trace(request)
    assert "in blocks.2, forward" in caught.value.what
    assert caught.value.why.startswith("aten._local_scalar_dense.default (.item(), ")
    assert caught.value.what == snapshot
    assert caught.value.fix == snapshot
    told = answer(msgspec.json.encode(request), None)
    assert told["refused"]["what"] == caught.value.what


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [("adamw", 2, 2.1), ("muon", 1, 2), ("adafactor", 0, 0.2), ("adamw_8bit", 0.5, 2)],
)
def test_the_states_of_every_optimizer_are_traced(
    llama: Work, optimizer: str, least: float, most: float
) -> None:
    work = replace(llama, optimizer=optimizer)
    states = trace(TraceRequest(work=work, candidate=single(), kernels="cuda")).states
    assert least <= states["optimizer"] / states["parameters"] <= most


def test_many_shards_are_not_traced(llama: Work, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="128 shards") as refused:
        trace(TraceRequest(work=llama, candidate=fsdp(1, 128)))
    assert refused.value == snapshot


def test_what_is_broken_is_told_with_its_own_words(own: Work) -> None:
    request = TraceRequest(
        work=replace(own, build="no_such_module:make"),
        candidate=single(),
    )
    told = answer(msgspec.json.encode(request), None)
    assert "no module 'no_such_module'" in told["refused"]["what"]


def test_nothing_says_what_a_batch_looks_like(own: Work, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as refused:
        build_step(replace(own, dataset=None), single(), made_up_world())
    assert refused.value == snapshot


def test_a_model_of_fewer_layers_is_the_same_otherwise(own: Work) -> None:
    candidate = single(micro_batch_size=2, accumulation=2)
    built: BuiltStep = build_step(own, candidate, made_up_world(), blocks=3)
    assert [len(built.blocks), built.depth.blocks] == [3, 5]
    assert built.block_of(built.blocks[2].wide) == 2  # type: ignore[arg-type]
    assert built.train().applied
    step = built.step(1)
    assert [step.rounds, step.samples, len(list(step))] == [2, 4, 2]
