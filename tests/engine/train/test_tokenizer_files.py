"""A tokenizer's files go with the weights: what is saved encodes as its source, and loses no file of it."""

import json
from pathlib import Path

import pytest

import tiny_models
from torchmuster.errors import Impossible
from torchmuster.train.data.tokenizers import TransformersTokenizer
from torchmuster.train.models import hugging_face

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]


@pytest.mark.parametrize("kind", tiny_models.FILES)
def test_a_tokenizer_is_saved_with_all_its_files(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tiny_models.make_model(tmp_path / "model", kind)
    tokenizer = AutoTokenizer.from_pretrained(source)
    TransformersTokenizer(str(source)).save(tmp_path / "out")
    names = {one.name for one in (tmp_path / "out").iterdir()}
    assert names >= set(tiny_models.FILES[kind])
    assert names.isdisjoint({"config.json", "model.safetensors", "generation_config.json"})
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


def test_several_chat_templates(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tiny_models.make_model(tmp_path / "model", "byte-level")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    TransformersTokenizer(str(source)).save(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    made = again.apply_chat_template(tiny_models.CHAT, chat_template="short", tokenize=False)
    assert made == "foxes?"


def test_other_files_of_the_folder_stay_where_they_are(tmp_path: Path) -> None:
    source = tiny_models.make_model(tmp_path / "model", "word-piece")
    for name in ("data.txt", "secret.json", "README.md", "code.py"):
        (source / name).write_text("{}")
    TransformersTokenizer(str(source)).save(tmp_path / "out")
    assert {one.name for one in (tmp_path / "out").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers builds one with an empty vocabulary, by which every text is nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 60_000}))
    with pytest.raises(Impossible) as refused:
        hugging_face.load_tokenizer(str(tmp_path))
    assert refused.value.what == f"{tmp_path} has no tokenizer"
