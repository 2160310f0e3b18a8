"""What is computed for a deep model from shallow traces is what a trace of the whole model finds."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from torchmuster.plan import estimate
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.trace import trace
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers"), pytest.mark.slow]

CARD = Gpu(name="made-up", memory_bytes=80 * GiB, flops={}, bandwidth_bytes_s=1e12)
MACHINES = Hardware(card=CARD, machines=4, cards_per_machine=4)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 59968,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture
def work(tmp_path: Path) -> Work:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return Work(model_name_or_path=str(tmp_path), sequence_length=96)


def candidate(
    strategy: Literal["single", "ddp", "fsdp"], copies: int, shards: int, **more: Any
) -> Candidate:
    return Candidate(
        strategy=strategy,
        layout=ShardLayout(copies=copies, shards=shards),
        **more,
    )


def shallow(work: Work, one: Candidate) -> list[TraceRecord]:
    requests = estimate.trace_requests(work, one, kernels="cuda")
    return [trace(request) for request in requests]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(
            candidate("fsdp", 1, 4, precision="bf16", micro_batch_size=12),
            marks=pytest.mark.nightly,
        ),
        candidate("fsdp", 1, 12, reshard=False),
        pytest.param(candidate("fsdp", 1, 96, recompute="full"), marks=pytest.mark.nightly),
        candidate("single", 1, 1, precision="bf16", recompute=2),
    ],
    ids=[
        "many samples",
        "shards of no even rows",
        "more shards than rows",
        "every second block recomputed",
    ],
)
def test_a_few_blocks_give_the_peak_of_the_whole_model(one: Candidate, work: Work) -> None:
    truth = trace(TraceRequest(work=work, candidate=one, kernels="cuda"))
    computed = estimate.predict_memory(shallow(work, one), one, hardware=MACHINES)
    assert computed.tensor_bytes == pytest.approx(truth.peak_bytes, rel=0.001)
    highest = max(truth.peaks, key=lambda peak: peak.peak_bytes)
    assert computed.peak_at.startswith(highest.phase)


def test_a_model_of_few_blocks_is_traced_whole(work: Work) -> None:
    config = Path(str(work.model_name_or_path)) / "config.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    one = candidate("single", 1, 1, micro_batch_size=6)
    records = shallow(work, one)
    assert {record.blocks_traced for record in records} == {2}
    truth = trace(TraceRequest(work=work, candidate=one, kernels="cuda"))
    found = estimate.predict_memory(records, one, hardware=MACHINES)
    assert found.tensor_bytes == pytest.approx(truth.peak_bytes, rel=0.001)
