"""A model of transformers is built once in a process, and every trace has a copy of a few of its layers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes import build_step
from torchmuster.plan.probes.trace import trace
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.nightly,
]

TIED = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SHARDED = Candidate(
    strategy="fsdp", layout=ShardLayout(copies=1, shards=4), precision="bf16", recompute="full"
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    build_step._of_transformers.cache_clear()
    yield
    build_step._of_transformers.cache_clear()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    return Work(model_name_or_path=str(tmp_path), sequence_length=32)


def traced(work: Work, blocks: int | None) -> TraceRecord:
    return trace(TraceRequest(work=work, candidate=SHARDED, blocks=blocks, kernels="cuda"))


@pytest.mark.parametrize("lora", [None, pytest.param({"r": 4}, marks=pytest.mark.nightly)])
def test_a_copy_is_traced_like_a_model_that_was_just_built(
    work: Work, lora: dict[str, Any] | None
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    work = replace(work, lora=lora)
    built = []
    for blocks in (3, None, 4):
        build_step._of_transformers.cache_clear()
        built.append(traced(work, blocks))
    copied = [traced(work, blocks) for blocks in (3, None, 4)]
    assert build_step._of_transformers.cache_info().misses == 1
    assert copied == built
    assert [one.blocks_traced for one in copied] == [3, 6, 4]
    assert {one.blocks for one in copied} == {6}


def test_another_config_is_another_model(work: Work) -> None:
    before = traced(work, 3)
    (Path(str(work.model_name_or_path)) / "config.json").write_text(
        json.dumps(TIED | {"num_hidden_layers": 5})
    )
    assert (before.blocks, traced(work, 3).blocks) == (6, 5)
