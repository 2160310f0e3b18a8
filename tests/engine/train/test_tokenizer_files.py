"""A tokenizer's files go with the weights: what is saved encodes as its source."""

import json
from pathlib import Path

import pytest

import tiny_models
from torchmuster.errors import Impossible
from torchmuster.train.data.tokenizers import TransformersTokenizer
from torchmuster.train.models import hugging_face

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]


@pytest.mark.parametrize("kind", tiny_models.FILES)
def test_a_saved_tokenizer_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tiny_models.make_model(tmp_path / "model", kind)
    tokenizer = AutoTokenizer.from_pretrained(source)
    TransformersTokenizer(str(source)).save(tmp_path / "out")
    # Without a config.json, as next to a LoRA adapter.
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*tiny_models.LINES, "Ünknown <|im_end|> words\n\n  <think>"]
    assert again(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.model_max_length == tokenizer.model_max_length
    assert again.chat_template == tokenizer.chat_template
    if kind == "byte-level":
        made = again.apply_chat_template(tiny_models.CHAT, tokenize=False)
        assert made == tokenizer.apply_chat_template(tiny_models.CHAT, tokenize=False)
        assert made.startswith("<|im_start|>user\nfoxes?<|im_end|>\n")


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers builds one with an empty vocabulary, by which every text is nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 60_000}))
    with pytest.raises(Impossible) as refused:
        hugging_face.load_tokenizer(str(tmp_path))
    assert refused.value.what == f"{tmp_path} has no tokenizer"
