"""Which architectures keep the documents of a packed row apart: each is tried."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchmuster.config.settings import Data, Settings
from torchmuster.errors import Impossible
from torchmuster.train.data.text import TextFormat
from torchmuster.train.data.tokenizers import ByteTokenizer
from torchmuster.train.models.hugging_face import find_model, mixed_documents_of
from torchmuster.train.models.packing import mixed_documents
from torchmuster.worker.data import unpacked

pytestmark = [
    pytest.mark.engine,
    pytest.mark.integrations,
    pytest.mark.usefixtures("quiet_transformers"),
]

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 300}
APART: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "gemma": {**COMMON, "head_dim": 8},
    "gemma3_text": {**COMMON, "head_dim": 8},
    "mistral": COMMON,
    "gpt2": GPT2,
    "phi": COMMON,
}
MIXED: dict[str, dict[str, Any]] = {
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 300},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 300, "state_size": 8},
    "rwkv": {
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 300,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 300},
}


@pytest.mark.parametrize("kind", [*APART, *MIXED])
def test_documents_of_a_row(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, **APART.get(kind, MIXED.get(kind, {}))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    problem = mixed_documents_of(find_model(str(tmp_path)))
    assert (problem is None) == (kind in APART), problem
    assert problem is None or "after another one" in problem


class Own(nn.Module):
    """A model that adds up what it has seen: of the row, or of the document."""

    def __init__(self, *, by_document: bool) -> None:
        super().__init__()
        self._by_document = by_document
        self.embedding = nn.Embedding(50, 16)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        seen = self.embedding(input_ids).cumsum(1)
        if self._by_document:
            begins = torch.arange(input_ids.shape[1]) - position_ids
            before = torch.cat([torch.zeros_like(seen[:, :1]), seen], 1)
            seen = seen - before.gather(1, begins[..., None].expand_as(seen))
        return seen @ self.embedding.weight.T


@pytest.mark.parametrize("by_document", [True, False])
def test_a_model_of_ones_own(by_document: bool) -> None:
    problem = mixed_documents(Own(by_document=by_document), 50)
    assert (problem is None) == by_document


def test_packing_is_turned_off_or_refused() -> None:
    text = TextFormat(tokenizer=ByteTokenizer(), sequence_length=8)

    assert not unpacked(text, Settings(), "it mixes them").pack
    with pytest.raises(Impossible, match=r"data\.pack is true"):
        unpacked(text, Settings(data=Data(pack=True)), "it mixes them")
