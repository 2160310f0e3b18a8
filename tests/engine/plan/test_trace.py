"""A traced training takes what a real one takes, and says where; what cannot be followed is refused by name."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, MusterError
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.operations import scratch_bytes_of
from torchmuster.plan.probes.real_steps import real_steps
from torchmuster.plan.probes.step_tracer import HOST, StepTracer
from torchmuster.plan.probes.trace import trace, trace_or_error
from torchmuster.plan.real_steps import RealSteps
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.tracer import Tracer
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


@pytest.fixture(autouse=True, scope="module")
def tracker_of_python() -> None:
    """Start the process that multiprocessing keeps until Python's exit, which is no leak."""
    resource_tracker.ensure_running()


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
    assert record.peaks[0].by_category["parameters"] == 16 * 4000 * 2
    assert record.parameter_count == 16 * 4000


def weights_taken_by_real_backward(output: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many times a weight's size is allocated, without a mode, which would change it."""
    gc.collect()  # what another test left would be freed meanwhile, and subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        output.sum().backward()  # type: ignore[no-untyped-call]
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(sizes)) // (weight.numel() * weight.itemsize)


def peak_of_real_call(call: Any) -> int:
    """Return the most bytes that torch's allocator had given out within a call."""
    call()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_takes_the_scratch_memory_of_its_cpu_kernel(dtype: torch.dtype) -> None:
    images, weight = torch.ones(2, 24, 16, 16, dtype=dtype), torch.ones(24, 24, 3, 3, dtype=dtype)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    calls = {
        forward: (images, weight, None, *options),
        backward: (images, images, weight, [24], *options, [True, True, False]),
    }
    results = {forward: images.nbytes, backward: images.nbytes + weight.nbytes}
    for operation, args in calls.items():
        scratch_bytes = scratch_bytes_of(operation, args)
        assert scratch_bytes > 0
        measured = peak_of_real_call(lambda: operation(*args))  # noqa: B023
        assert measured == results[operation] + scratch_bytes
    assert scratch_bytes_of(torch.ops.aten.relu.default, (images,)) == 0


def test_a_gradient_is_added_to_in_place_unless_it_is_a_view(own: Work) -> None:
    x, weight = torch.zeros(1, 16), torch.zeros(16, 4000, requires_grad=True)
    transposed = weight.detach().T.contiguous().requires_grad_()
    used = x @ weight + x.relu() @ weight
    tied = functional.linear(functional.linear(x, transposed)[:, :16], transposed)
    expected = {
        "used_twice": weights_taken_by_real_backward(used, weight),
        "tied": weights_taken_by_real_backward(tied, transposed),
    }
    assert expected == {"used_twice": 2, "tied": 3}
    weights = 16 * 4000 * 4
    for name, times in expected.items():
        for kernels in KERNELS:
            work = built_by(name, own, optimizer="sgd")
            record = trace(TraceRequest(work=work, candidate=single(), kernels=kernels))
            largest = max(peak.peak_bytes for peak in record.peaks if peak.phase == "backward")
            states = 2 * weights  # and the momentum
            assert (largest - states) // weights == times, (name, kernels)


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


def test_flops_are_those_of_the_matrix_products(own: Work) -> None:
    record = trace(TraceRequest(work=own, candidate=single(micro_batch_size=8)))
    products = 16 * 64 + 5 * 2 * 64 * 256 + 64 * 10
    assert sum(record.costs["last"].flops.values()) == 6 * 8 * products


@pytest.mark.nightly
def test_copies_of_shards_reduce_in_the_last_micro_batch(llama: Work) -> None:
    record = trace(TraceRequest(work=llama, candidate=fsdp(4, 2, accumulation=2)))
    assert "copies" not in record.costs["first"].sent_bytes
    assert record.costs["last"].sent_bytes["copies"] > 0
    assert record.costs["first"].sent_bytes["shards"] > 0


def test_ddp_reduces_its_gradients_once(llama: Work) -> None:
    candidate = Candidate(strategy="ddp", layout=ShardLayout(copies=4, shards=1), accumulation=2)
    record = trace(TraceRequest(work=llama, candidate=candidate))
    weights = record.peaks[0].by_category["parameters"]
    assert record.costs["last"].sent_bytes["copies"] == pytest.approx(2 * weights, rel=0.01)
    assert record.costs["first"].sent_bytes.get("copies", 0) < 0.01 * weights


def test_a_storage_takes_its_bytes_into_another_category() -> None:
    tracer = StepTracer(on_host=False)
    gathered = torch.zeros(8).untyped_storage()
    tracer.see(gathered)
    tracer.see(gathered, "collectives")
    assert dict(tracer.by_category) == {"activations": 0, "collectives": 32}
    tracer.see(gathered, HOST)
    assert tracer.live_bytes == 0


def test_cuda_fuses_norms_and_updates_without_a_copy_of_all_parameters(own: Work) -> None:
    candidate = single(micro_batch_size=64)
    cpu, cuda = (
        trace(TraceRequest(work=own, candidate=candidate, kernels=kernels)) for kernels in KERNELS
    )
    activations = [
        next(peak for peak in record.peaks if peak.phase == "loss").by_category["activations"]
        for record in (cpu, cuda)
    ]
    assert activations[1] < activations[0]


def attention_peaks(work: Work) -> list[int]:
    return [
        trace(
            TraceRequest(work=work, candidate=single(precision="bf16"), kernels=kernels)
        ).peak_bytes
        for kernels in KERNELS
    ]


@pytest.mark.nightly
def test_cuda_drops_out_within_attention(tmp_path: Path) -> None:
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
    cpu, cuda = attention_peaks(work)
    pairs = 2 * 4 * 128 * 128  # of tokens, in all blocks and heads: the CPU keeps 13 bytes for each
    assert cpu - cuda > 8 * pairs


ATTENDING = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
import helper_NAME

class Attending(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.layer, self.attend = nn.Linear(16, 64), attend

    def forward(self, x):
        x = self.layer(x).view(len(x), 4, 64 // 4, 1).expand(-1, -1, -1, 16) + 0.0
        x = x.repeat(1, 1, 16, 1)
        return self.attend(x, x, x, dropout_p=0.5).flatten(1)[:, :10]

def by_name():
    return Attending(lambda *a, **k: scaled_dot_product_attention(*a, **k))

def by_helper():
    return Attending(helper_NAME.attend)

def samples():
    return [(torch.zeros(16), 3)]
"""


def test_attention_imported_by_name_is_planned_as_cudas(tmp_path: Path) -> None:
    name = tmp_path.name.replace("-", "_")
    (tmp_path / f"attending_{name}.py").write_text(ATTENDING.replace("NAME", name))
    (tmp_path / f"helper_{name}.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def attend(*args, **kwargs):\n    return sdpa(*args, **kwargs)\n"
    )
    module = f"attending_{name}"
    traced = {}
    for build in ("by_name", "by_helper"):
        work = Work(build=f"{module}:{build}", dataset=f"{module}:samples", folder=str(tmp_path))
        request = TraceRequest(work=work, candidate=single(), kernels="cuda")
        traced[build] = trace(request)
    assert traced["by_name"].peak_bytes == traced["by_helper"].peak_bytes


@pytest.mark.nightly
def test_what_is_offloaded_is_the_hosts(llama: Work) -> None:
    kept, offloaded = (
        trace(TraceRequest(work=llama, candidate=fsdp(1, 2, cpu_offload=offload), kernels="cuda"))
        for offload in (False, True)
    )
    assert kept.host_bytes == 0
    states = kept.peaks[0].by_category["parameters"] + kept.peaks[0].by_category["optimizer"]
    assert offloaded.host_bytes == pytest.approx(states * 4 / 3, rel=0.01)
    assert kept.peak_bytes - offloaded.peak_bytes >= states - 4096


@pytest.mark.parametrize(
    ("optimizer", "options", "least", "most"),
    [
        pytest.param("adamw", None, 2, 2.1, marks=pytest.mark.nightly),
        pytest.param("torch.optim:Adafactor", None, 0, 0.2, marks=pytest.mark.nightly),
        ("torch.optim:SGD", {"momentum": 0.9}, 1, 1.1),
    ],
)
def test_the_states_of_every_optimizer_are_traced(
    llama: Work, optimizer: str, options: dict[str, Any] | None, least: float, most: float
) -> None:
    work = replace(llama, optimizer=optimizer, optimizer_options=options)
    begin = trace(TraceRequest(work=work, candidate=single(), kernels="cuda")).peaks[0].by_category
    assert least <= begin.get("optimizer", 0) / begin["parameters"] <= most


def test_what_user_code_writes_to_descriptor_1_does_not_reach_the_answers(tmp_path: Path) -> None:
    code = MODELS.replace('print("a model may print")', "os.system('echo from a child process')")
    name = f"loud_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(f"import os\nos.system('echo at import'){code}")
    work = Work(build=f"{name}:make", dataset=f"{name}:samples", folder=str(tmp_path))
    with Tracer() as tracer:
        record = tracer.trace(TraceRequest(work=work, candidate=single(micro_batch_size=2)))
    assert record.parameter_count > 0


def test_what_reads_values_is_refused_by_name(own: Work, snapshot: SnapshotAssertion) -> None:
    work = built_by("reads_values", own)
    candidate = single(micro_batch_size=2)
    request = TraceRequest(work=work, candidate=candidate)
    with pytest.raises(Impossible) as caught:
        trace(request)
    module = str(own.build).partition(":")[0]
    assert f"without values at {module}.py:13, forward" in caught.value.what
    assert caught.value.why.startswith("aten._local_scalar_dense.default (.item(), ")
    assert caught.value.fix == snapshot


def test_what_is_broken_is_told_with_its_own_words(own: Work) -> None:
    request = TraceRequest(
        work=replace(own, build="no_such_module:make"),
        candidate=single(),
    )
    error = trace_or_error(request)
    assert isinstance(error, Impossible)
    assert error.what.startswith("model.build is 'no_such_module:make'")
