"""Predicted peaks of tensor memory are those of real ranks: a few cases of ``benchmarks/plan_memory.py``."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from nightly import nightly_except
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.real_steps import RealSteps
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.tracer import Tracer

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What is off by less is a scalar or two that live a moment longer.
EXACT = 1e-4
_WITHIN = {"micro_batch_size": 2, "accumulation": 1, "optimizer": "adamw", "clip": True}
CASES: dict[str, dict[str, Any]] = {
    "one process, grouped attention": _WITHIN
    | {"family": "llama", "strategy": "single", "copies": 1, "shards": 1}
    | {"number_type": "fp32", "recompute": "none", "accumulation": 2},
    "copies, autocast, products kept": _WITHIN
    | {"family": "gpt2", "strategy": "ddp", "copies": 2, "shards": 1}
    | {"number_type": "bf16", "recompute": "selective", "optimizer": "sgd", "clip": False},
    "copies, running means": _WITHIN
    | {"family": "residual", "strategy": "ddp", "copies": 2, "shards": 1}
    | {"number_type": "fp32", "recompute": "none", "micro_batch_size": 4},
    "shards, tied embeddings, all recomputed": _WITHIN
    | {"family": "qwen2", "strategy": "fsdp", "copies": 1, "shards": 2}
    | {"number_type": "bf16", "recompute": "full", "accumulation": 2},
    "three shards that stay whole, 16-bit weights": _WITHIN
    | {"family": "little_gpt", "strategy": "fsdp", "copies": 1, "shards": 3}
    | {"number_type": "pure", "recompute": 2, "reshard": False},
    "copies of shards, pictures": _WITHIN
    | {"family": "vit", "strategy": "fsdp", "copies": 2, "shards": 2}
    | {"number_type": "fp32", "recompute": "none", "micro_batch_size": 4},
    "gradients of a weight that is used twice": _WITHIN
    | {"family": "bert", "strategy": "single", "copies": 1, "shards": 1, "clip": False}
    | {"number_type": "bf16", "recompute": "full", "micro_batch_size": 1, "optimizer": "sgd"},
    "shards, tied embeddings, all of 16 bits": _WITHIN
    | {"family": "bert", "strategy": "fsdp", "copies": 1, "shards": 2}
    | {"number_type": "pure", "recompute": "full", "micro_batch_size": 1},
    "shards, running means, autocast": _WITHIN
    | {"family": "residual", "strategy": "fsdp", "copies": 1, "shards": 2}
    | {"number_type": "bf16", "recompute": "none", "micro_batch_size": 4},
}
# The same with LoRA or QLoRA: a case, and what differs of its work.
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA, copies": (
        _WITHIN
        | {"family": "llama", "strategy": "ddp", "copies": 2, "shards": 1}
        | {"number_type": "bf16", "recompute": "none", "accumulation": 2},
        {"lora": {"r": 8}, "torch_dtype": "bfloat16"},
    ),
    "QLoRA, one process": (
        _WITHIN
        | {"family": "llama", "strategy": "single", "copies": 1, "shards": 1}
        | {"number_type": "bf16", "recompute": "none"},
        {"lora": {"r": 8}, "torch_dtype": "bfloat16", "load_in_4bit": True},
    ),
    "LoRA, shards, all recomputed": (
        _WITHIN
        | {"family": "qwen2", "strategy": "fsdp", "copies": 1, "shards": 2}
        | {"number_type": "bf16", "recompute": "full"},
        {"lora": {"r": 8, "target_modules": ["q_proj", "down_proj"]}, "torch_dtype": "bfloat16"},
    ),
    "LoRA, dropout, a layer that is trained whole": (
        _WITHIN
        | {"family": "llama", "strategy": "single", "copies": 1, "shards": 1}
        | {"number_type": "bf16", "recompute": "selective"},
        {
            "lora": {"r": 8, "lora_dropout": 0.1, "modules_to_save": ["lm_head"]},
            "torch_dtype": "bfloat16",
        },
    ),
    "QLoRA, copies, fp32": (
        _WITHIN
        | {"family": "mistral", "strategy": "ddp", "copies": 2, "shards": 1}
        | {"number_type": "fp32", "recompute": "none"},
        {"lora": {"r": 4}, "load_in_4bit": True},
    ),
    "QLoRA, transposed layers": (
        _WITHIN
        | {"family": "gpt2", "strategy": "single", "copies": 1, "shards": 1}
        | {"number_type": "bf16", "recompute": "full"},
        {"lora": {"r": 8}, "load_in_4bit": True},
    ),
}
# Tables that bitsandbytes keeps in each process are not traced: 1.5 kB.
EXACT_BYTES = 4096


@pytest.fixture(autouse=True, scope="module")
def tracker_of_python() -> None:
    """Start the process that multiprocessing keeps until Python's exit, which is no leak."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="module")
def benchmark_modules() -> Iterator[Any]:
    """Import the benchmark's parts, as its program does."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("peak_memory.cases"), import_module("peak_memory.truth")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def measured(
    benchmark_modules: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[int]]]:
    """Measure a case, once: the peak of each real rank in its steady steps, in bytes."""
    cases, truth = benchmark_modules
    folder = tmp_path_factory.mktemp("truth")
    known: dict[str, list[int]] = {}
    with truth.Truth(folder) as measuring:

        def peaks(name: str) -> list[int]:
            if name not in known:
                work, candidate = _described(cases, name, folder)
                steps = RealSteps(work=work, candidate=candidate, device="cpu", timed=0)
                told = measuring.measure(steps)
                assert not [one["failed"] for one in told if "failed" in one]
                known[name] = [min(one["peaks_bytes"][truth.STEADY :]) for one in told]
            return known[name]

        yield peaks


def _described(cases: Any, name: str, folder: Path) -> tuple[Work, Candidate]:
    choices, changes = ADAPTED[name] if name in ADAPTED else (CASES[name], {})
    case = cases.Case(**choices)
    return replace(case.work(folder), **changes), case.candidate()


@pytest.mark.parametrize(
    "name", nightly_except(["QLoRA, one process"], {name: name for name in ADAPTED})
)
def test_what_is_traced_with_lora_is_what_real_ranks_take(
    name: str,
    benchmark_modules: Any,
    measured: Callable[[str], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cases, _ = benchmark_modules
    work, candidate = _described(cases, name, tmp_path)
    with Tracer() as tracer:
        record = tracer.trace(TraceRequest(work=work, candidate=candidate, kernels="cpu"))
    peak = max(measured(name))
    assert record.peak_bytes == pytest.approx(peak, rel=EXACT, abs=EXACT_BYTES)


@pytest.mark.nightly
def test_what_is_traced_is_what_real_ranks_take(
    benchmark_modules: Any,
    measured: Callable[[str], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the measured ranks have it
    cases, _ = benchmark_modules
    asked = {name: cases.Case(**choices) for name, choices in CASES.items()}
    with Tracer() as tracer:
        traced = []
        for case in asked.values():
            request = TraceRequest(work=case.work(tmp_path), candidate=case.candidate())
            traced.append(tracer.trace(request))
    off = {}
    for name, record in zip(asked, traced, strict=True):
        peak = max(measured(name))
        error = record.peak_bytes / peak - 1
        if abs(error) > EXACT:
            off[name] = f"{error:+.4%} of {peak} bytes"
    assert not off
