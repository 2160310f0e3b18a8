"""transformers loads what was exported, and every bit is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from made_up_checkpoints import Whole, save
from torchmuster.checkpoints.export import ExportRequest
from torchmuster.checkpoints.store import FolderStore
from torchmuster.worker.exported import export_weights

pytestmark = [pytest.mark.engine, pytest.mark.integrations]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("most_in_a_file_bytes", [10**9, 2000])
def test_transformers_loads_an_export_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_in_a_file_bytes: int
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that would be left
    transformers: Any = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {
        f"model.{name}": Whole(
            dtype="BF16",
            shape=tuple(one.shape),
            content=_bytes(one),
            cuts=((5,), *((),) * (one.dim() - 1)),
        )
        for name, one in state.items()
    }
    tied = {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    store = FolderStore(tmp_path / "c")
    saved = save(store, 1, tensors, ranks=3, tied=tied)
    request = ExportRequest(
        checkpoint=str(store.folder / saved.name),
        folder=str(tmp_path / "out"),
        beside=str(tmp_path / "model"),
    )
    done = export_weights(request, most_in_a_file_bytes=most_in_a_file_bytes)
    assert done.compared == len(state)
    assert (len(done.files) > 1) == (most_in_a_file_bytes == 2000)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    assert not any(told.values()), told
    for name, tensor in model.state_dict().items():
        assert _bytes(loaded.state_dict()[name]) == _bytes(tensor), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
