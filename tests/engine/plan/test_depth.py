"""What is computed for a deep model from shallow traces is what a trace of the whole model finds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast, log_depth
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.allocator import simulate
from torchmuster.plan.probes import trace as probe
from torchmuster.plan.probes.trace import trace
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.train import losses
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers"), pytest.mark.slow]

LINK = Link(latency_s=1e-6, bytes_s=1e11)
CARD = Gpu(name="made-up", memory_bytes=80 * GiB, flops={}, bandwidth_bytes_s=1e12)
MACHINES = Hardware(card=CARD, machines=4, cards_per_machine=4, within=LINK, between=LINK)
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


def shallow(work: Work, one: Candidate, logs: Path | None = None) -> list[TraceRecord]:
    asked = memory.trace_requests(work, one, kernels="cuda", keep_log=logs is not None)
    records = [trace(each, logs=logs) for each in asked]
    return records + [trace(each, logs=logs) for each in memory.further_requests(records)]


def whole(work: Work, one: Candidate, logs: Path) -> TraceRecord:
    return trace(TraceRequest(work=work, candidate=one, kernels="cuda", keep_log=True), logs=logs)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(
            candidate("fsdp", 1, 4, precision="bf16", micro_batch_size=7), marks=pytest.mark.nightly
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
def test_peaks_and_logs_are_those_of_the_whole_model(
    one: Candidate, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_SHARDS", 96)
    truth = whole(work, one, tmp_path)
    records = shallow(work, one, tmp_path)
    of_other_sizes = records if one.micro_batch_size == 1 else shallow(work, one)
    computed = memory.predict_memory(of_other_sizes, one, hardware=MACHINES)
    assert computed.tensor_bytes == pytest.approx(truth.peak_bytes, rel=0.001)
    assert computed.where is not None
    highest = max(truth.peaks, key=lambda peak: peak.peak_bytes)
    assert (computed.where.phase, computed.where.operation) == (highest.phase, highest.operation)
    log = log_depth.read_log(str(truth.log))
    for kind in ("expandable", "classic"):
        found = memory.predict_memory(records, one, hardware=MACHINES, allocator=kind)
        assert found.reserved_bytes == pytest.approx(simulate(log, kind).peak_bytes, rel=0.01)


@pytest.mark.nightly
def test_a_further_trace_agrees(work: Work) -> None:
    one = candidate("single", 1, 1, micro_batch_size=3)
    records = shallow(work, one)
    asked = memory.check_request(records)
    assert asked is not None
    memory.check_records(records, trace(asked))


def test_a_model_of_few_blocks_is_traced_whole(work: Work) -> None:
    config = Path(str(work.model_name_or_path)) / "config.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    one = candidate("single", 1, 1, micro_batch_size=6)
    records = shallow(work, one)
    assert {record.blocks_traced for record in records} == {2}
    truth = trace(TraceRequest(work=work, candidate=one, kernels="cuda"))
    found = memory.predict_memory(records, one, hardware=MACHINES)
    assert found.tensor_bytes == pytest.approx(truth.peak_bytes, rel=0.001)
    assert memory.check_request(records) is None


def test_the_border_of_the_loss_is_known() -> None:
    assert forecast.WHOLE_ELEMENTS == losses._WHOLE_ELEMENTS
    with_parts = replace(Work(build="a:b", sequence_length=8), loss="language_model")
    assert forecast.traced_sizes(with_parts, 6, kernels="cuda") == (4, 8)
