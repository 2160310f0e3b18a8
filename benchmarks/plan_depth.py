"""How well the memory of a deep model is computed from traces of a few blocks: against whole traces.

    python benchmarks/plan_depth.py --out docs/measured/plan-depth.md

Each shape is planned from traces of 3 and 4 blocks (times n where every n-th block is recomputed) with two other micro-batch
sizes, and with 8 and 64 shards where it has more, or with its own if those are few and no power of two; then it is traced
whole. Compared are the peak of tensor bytes, and what the allocator keeps: simulated over the log that was made for the depth,
and over that of the whole trace.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchmuster.plan.hardware.catalogue import Hardware, Link, gpu_named
from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory import log_depth
from torchmuster.plan.memory.allocator import simulate
from torchmuster.plan.probes import trace as probe
from torchmuster.plan.probes.trace import trace
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

_LINK = Link(latency_s=1e-5, bytes_s=1e10)
_GROUPS: dict[str, dict[str, Any]] = {
    "llama-0.2B": {"model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "layers": 14},
    "llama-1B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "layers": 16},
    "llama-7B": {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "layers": 32},
    "llama-70B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "layers": 80},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "hidden_size": 768, "layers": 12},
    "qwen2-tied": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "layers": 24,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape: a model, how it is spread, and its portions."""

    model: str
    sequence: int
    strategy: str
    copies: int = 1
    shards: int = 1
    precision: str = "bf16"
    recompute: Recompute = "none"
    micro_batch_size: int = 1
    accumulation: int = 1
    reshard: bool = True

    @property
    def candidate(self) -> Candidate:
        """Return how it is trained."""
        return Candidate(
            strategy=self.strategy,  # type: ignore[arg-type]
            layout=ShardLayout(copies=self.copies, shards=self.shards),
            precision=self.precision,  # type: ignore[arg-type]
            recompute=self.recompute,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            reshard=self.reshard,
        )

    @property
    def words(self) -> str:
        """Return it in a few words."""
        layout = "" if self.strategy == "single" else f" {self.copies}x{self.shards}"
        whole = "" if self.reshard else ", no reshard"
        return (
            f"{self.strategy}{layout}{whole}, {self.precision}, recompute {self.recompute}, "
            f"{self.micro_batch_size} x {self.accumulation} x {self.sequence}"
        )


CASES = (
    Case(model="gpt2", sequence=1024, strategy="single", precision="fp32", micro_batch_size=8),
    Case(model="gpt2", sequence=512, strategy="ddp", copies=4, micro_batch_size=6, accumulation=3),
    Case(model="llama-0.2B", sequence=2048, strategy="single", recompute="full"),
    Case(model="llama-0.2B", sequence=1024, strategy="ddp", copies=8, recompute="selective"),
    Case(model="llama-0.2B", sequence=128, strategy="fsdp", shards=4, micro_batch_size=32),
    Case(model="llama-0.2B", sequence=512, strategy="fsdp", shards=4, recompute=2),
    Case(model="llama-0.2B", sequence=512, strategy="fsdp", shards=12, micro_batch_size=5),
    Case(model="llama-0.2B", sequence=512, strategy="fsdp", shards=24, recompute="full"),
    Case(model="llama-0.2B", sequence=512, strategy="fsdp", shards=96),
    Case(model="llama-0.2B", sequence=512, strategy="fsdp", shards=100, recompute="full"),
    Case(model="qwen2-tied", sequence=512, strategy="fsdp", shards=4, recompute=3),
    Case(model="qwen2-tied", sequence=2048, strategy="fsdp", shards=8, micro_batch_size=4),
    Case(
        model="qwen2-tied",
        sequence=1024,
        strategy="fsdp",
        copies=4,
        shards=8,
        recompute="full",
        micro_batch_size=3,
        accumulation=4,
    ),
    Case(model="llama-1B", sequence=4096, strategy="fsdp", shards=8, micro_batch_size=2),
    Case(model="llama-1B", sequence=2048, strategy="fsdp", shards=8, reshard=False),
    Case(model="llama-1B", sequence=2048, strategy="fsdp", shards=32, precision="fp32"),
    Case(model="llama-7B", sequence=4096, strategy="fsdp", shards=8),
    Case(model="llama-7B", sequence=4096, strategy="fsdp", shards=16, recompute="selective"),
    Case(model="llama-7B", sequence=4096, strategy="fsdp", shards=48, recompute="full"),
    Case(model="llama-70B", sequence=8192, strategy="fsdp", shards=64, recompute="full"),
)


def main() -> None:
    """Measure all shapes, or those that have a word in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="a word that the model's name or its training must have"
    )
    parser.add_argument("--out", type=Path, help="a page to write")
    asked = parser.parse_args()
    # Whole traces of more shards take longer than a plan may, but are what it is compared with.
    probe.MOST_SHARDS = max(case.shards for case in CASES)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for case in CASES:
            if asked.only in f"{case.model} {case.words}":
                rows.append(row(case, *measured(case, Path(folder))))
                print(rows[-1], flush=True)
    if asked.out is not None:
        asked.out.write_text(_page(rows))


def _work(model: str, sequence: int, folder: Path) -> Work:
    known = _GROUPS[model]
    width, layers = known["hidden_size"], known["layers"]
    config = {key: value for key, value in known.items() if key != "layers"}
    if known["model_type"] == "gpt2":
        config = {**config, "n_embd": width, "n_layer": layers, "n_head": 12, "n_positions": 1024}
    else:
        config |= {
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64 if width < 4096 else width // 128,
            "num_key_value_heads": 2 if width < 2048 else 8,
            "intermediate_size": width * 7 // 2,
            "max_position_embeddings": 8192,
        }
    place = folder / model
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return Work(model_name_or_path=str(place), sequence_length=sequence)


def measured(case: Case, folder: Path) -> tuple[list[TraceRecord], TraceRecord]:
    """Return the shallow traces of a shape, and the whole one."""
    work = _work(case.model, case.sequence, folder)
    wanted = [
        replace(one, keep_log=True)
        for keep_log in (False, True)
        for one in memory.trace_requests(work, case.candidate, kernels="cuda", keep_log=keep_log)
    ]
    shallow = [trace(one, logs=folder) for one in dict.fromkeys(wanted)]
    shallow += [trace(one, logs=folder) for one in memory.further_requests(shallow)]
    return shallow, _whole(work, case, folder)


def row(case: Case, shallow: list[TraceRecord], whole: TraceRecord) -> str:
    """Compare one shape: tensors are computed over depth, size and shards, the allocator over depth and shards."""
    hardware = Hardware(
        card=gpu_named("H100"), machines=64, cards_per_machine=8, within=_LINK, between=_LINK
    )
    size, candidate = case.micro_batch_size, replace(case.candidate, accumulation=1)
    sizes = {one.request.candidate.micro_batch_size for one in shallow}
    # Its own size is left out, so that it is computed from others; unless it is one of the usual two.
    others = [
        one for one in shallow if len(sizes) < 3 or one.request.candidate.micro_batch_size != size
    ]
    same = [one for one in shallow if one.request.candidate.micro_batch_size == size]
    computed = memory.predict_memory(others, candidate, hardware=hardware).tensor_bytes
    kept = simulate(log_depth.read_log(str(whole.log))).peak_bytes
    reserved = memory.predict_memory(same, candidate, hardware=hardware).reserved_bytes
    return " | ".join(
        (
            f"| {case.model}, {whole.blocks} blocks",
            case.words,
            f"{whole.peak_bytes / GiB:.3f}",
            f"{computed / whole.peak_bytes - 1:+.4%}",
            f"{kept / GiB:.3f}",
            "none |" if reserved is None else f"{reserved / kept - 1:+.3%} |",
        )
    )


def _whole(work: Work, case: Case, folder: Path) -> TraceRecord:
    candidate = replace(
        case.candidate,
        accumulation=min(case.accumulation, 2),
        layout=ShardLayout(copies=min(case.copies, 2), shards=case.shards),
    )
    return trace(
        TraceRequest(work=work, candidate=candidate, kernels="cuda", keep_log=True), logs=folder
    )


_HEAD = """# Deep models from shallow traces

`muster plan` traces 3 and 4 blocks of a model with two micro-batch sizes. Numbers of shards up to 8, and numbers below 64 that
are not powers of two, are traced directly; all others are computed from traces with 8 and with 64 shards. The planner also
computes all other depths and micro-batch sizes. For this page, the whole model of each configuration was also traced (torch 2.13,
CUDA kernels, no device). Written by `benchmarks/plan_depth.py`.

*Tensors* is the peak of tensor bytes in the whole trace. *Reserved* is the memory that a simulation of PyTorch's allocator (with
expandable segments) reserves for the allocations of the whole trace. The column after each value shows by how much the value
computed from shallow traces differs from it. The last part of a configuration is micro-batch size x accumulation x tokens.

| model | configuration | tensors, GiB | computed | reserved, GiB | computed |
|---|---|---|---|---|---|
"""


def _page(rows: list[str]) -> str:
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
