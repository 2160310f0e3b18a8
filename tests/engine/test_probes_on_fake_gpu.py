"""The probes on a GPU: which device they ask, how large their tensors are, and when they wait for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from fake_accelerator import FakeAccelerator
from fake_gpu_tensors import FakeGpu
from made_up_worlds import made_up_world
from torchmuster.bench import precision, timing
from torchmuster.diagnose.probes import collectives, matmul
from torchmuster.diagnose.rank_record import Values
from torchmuster.launch.probes import process_group
from torchmuster.plan.probes import real_steps
from torchmuster.profile.probes import trace
from torchmuster.prove.probes.fingerprints import random_states, tensors_hash
from torchmuster.units import GiB

pytestmark = pytest.mark.engine

FIRST = torch.device("cuda", 0)
GPU = torch.device("cuda", 3)
XPU = torch.device("xpu", 1)
WORLD = replace(made_up_world(), device=GPU, backend="nccl")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator().install(monkeypatch)


class Allocator:
    """Figures of an allocator: each device has its own, and a reset ends a peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: dict[int, int] = dict.fromkeys(range(8), 0)
        self.peak = dict(self.live)
        self.reserved = dict(self.live)
        self.emptied = 0
        for name, function in {
            "memory_allocated": lambda device=FIRST: self.live[torch.device(device).index],
            "max_memory_allocated": lambda device=FIRST: self.peak[torch.device(device).index],
            "max_memory_reserved": lambda device=FIRST: self.reserved[torch.device(device).index],
            "reset_peak_memory_stats": self._reset,
            "get_memory_info": lambda device: (GiB, (10 + torch.device(device).index) * GiB),
            "empty_cache": self._empty,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)

    def use(self, device: torch.device, live: int, peak: int) -> None:
        """Let a device have so many bytes now, and more of them in between."""
        self.live[device.index] = live
        self.peak[device.index] = max(self.peak[device.index], peak)
        self.reserved[device.index] = max(self.reserved[device.index], 2 * peak)

    def _reset(self, device: torch.device) -> None:
        self.peak[device.index] = self.live[device.index]

    def _empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def waits(accelerator: FakeAccelerator) -> list[Any]:
    return [call.argument for call in accelerator.calls if call.name == "synchronize"]


# ---- bench


@pytest.mark.parametrize(
    ("device", "hip", "capability", "expected"),
    [
        (GPU, None, (8, 0), ["fp32", "bf16", "fp16"]),
        (GPU, None, (7, 5), ["fp32", "fp16"]),
        (GPU, "6.4", (9, 4), ["fp32", "bf16", "fp16"]),
        (XPU, None, None, ["fp32", "bf16", "fp16"]),
    ],
)
def test_each_gpu_has_its_own_precisions(
    device: torch.device,
    hip: str | None,
    capability: tuple[int, int] | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {GPU: capability}.__getitem__)
    assert precision.precisions(device) == expected


def test_a_calls_memory_is_what_it_adds_on_its_device(allocator: Allocator) -> None:
    allocator.use(GPU, live=5, peak=1000)  # a peak of before
    allocator.use(FIRST, live=7, peak=5000)
    assert timing.memory_of(lambda: allocator.use(GPU, live=15, peak=65), GPU) == (60, 10)


@pytest.mark.parametrize(("kind", "activity"), [("cuda", "CUDA"), ("xpu", "XPU"), ("mps", None)])
def test_a_trace_has_the_kernels_of_the_accelerator(
    kind: str, activity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind)
    )
    of_kernels = [getattr(ProfilerActivity, activity)] if activity else []
    assert trace._activities() == [ProfilerActivity.CPU, *of_kernels]


# ---- plan


def test_tensor_memory_is_the_allocators_and_a_reading_ends_a_peak(allocator: Allocator) -> None:
    with real_steps.peaks_of_tensors(GPU) as read_peak:
        allocator.use(GPU, live=10, peak=30)
        assert read_peak() == 30
        assert read_peak() == 10


def test_a_real_step_ends_when_the_device_has_finished(accelerator: FakeAccelerator) -> None:
    built = SimpleNamespace(world=WORLD, train=lambda number: accelerator.note("train", number))
    assert real_steps._timed(built, 4) >= 0  # type: ignore[arg-type]
    assert [(call.name, call.argument) for call in accelerator.calls] == [
        ("train", 4),
        ("synchronize", GPU),
    ]


# ---- diagnose and launch


def test_products_are_checked_in_every_dtype_of_a_gpu(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_TIMES_ON_GPU": 2, "_WARM_S": 0.0, "_MEASURE_S": 0.001}.items():
        monkeypatch.setattr(matmul, name, value)
    compared: list[tuple[torch.device, torch.device, tuple[int, ...]]] = []

    def compare(got: torch.Tensor, expected: torch.Tensor) -> Any:
        compared.append((got.device, expected.device, tuple(got.shape)))
        return Values(compared=got.numel(), wrong=int((got.cpu() != expected.cpu()).sum()))

    monkeypatch.setattr(matmul, "compare_values", compare)
    with FakeGpu(accelerator, monkeypatch):
        found = matmul.check_matmuls(GPU)
    assert [one.precision for one in found] == ["float32", "bfloat16", "float16"]
    assert [one.values.wrong for one in found] == [0, 0, 0]
    assert set(compared) == {(GPU, GPU, (512, 512))}
    assert set(waits(accelerator)) == {GPU}


def test_a_gpu_build_without_devices_reports_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert collectives.gpu_error() == "RuntimeError: Found no NVIDIA driver"


def test_a_group_that_another_library_made_is_on_this_threads_gpu(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "current_group", lambda: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    torch.accelerator.set_device_index(5)
    assert process_group.current_device() == torch.device("cuda", 5)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert process_group.current_device() == torch.device("cpu")


# ---- prove


def test_the_random_state_of_a_gpu_in_use_is_part_of_a_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    assert "cuda" not in random_states()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    assert random_states()["cuda"] == tensors_hash([state])
