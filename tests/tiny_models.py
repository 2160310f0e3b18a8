"""Model folders as they come from the hub, a few kilobytes large: weights, config and a real tokenizer."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 320
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LINES = [f"{number} foxes jump over {number + 1} lazy dogs, don't they?" for number in range(80)]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "foxes?"}, {"role": "assistant", "content": "1 foxes"}]
# What folders have besides weights; all of it must be in what is trained from them.
FILES: Mapping[str, tuple[str, ...]] = {
    "byte-level": (
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
        *("chat_template.jinja", "added_tokens.json", "special_tokens_map.json"),
    ),
    "word-piece": ("tokenizer_config.json", "vocab.txt"),
    "sentence-piece": ("tokenizer.json", "tokenizer_config.json", "spiece.model"),
}


def make_model(folder: Path, tokenizer: str, **config: object) -> Path:
    """Make a folder with random weights and one of the tokenizers of ``FILES``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would leave a thread
    folder.mkdir()
    # For a Qwen, transformers would not believe that the tokenizer is BERT's.
    kind = "llama" if tokenizer == "word-piece" else "qwen2"
    described = {"model_type": kind, "tie_word_embeddings": True, **TINY, **config}
    (folder / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    generation = {"do_sample": True, "temperature": 0.5, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    makers: Mapping[str, Callable[[Path], None]] = {
        "byte-level": _byte_level,
        "word-piece": _word_piece,
        "sentence-piece": _sentence_piece,
    }
    makers[tokenizer](folder)
    assert {one for one in FILES[tokenizer] if not (folder / one).is_file()} == set()
    return folder


_VIT = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# Configs of every architecture whose exports are proven, each with the class that it is saved as.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**TINY, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3ForCausalLM", {**TINY, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {**TINY, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", TINY),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, **_GPT2}),
    "phi": ("PhiForCausalLM", TINY),
    "bert": ("BertForMaskedLM", TINY),
    "vit": ("ViTModel", {**_VIT, "num_hidden_layers": 2, "num_attention_heads": 2}),
}
CLASSES = ("cats", "dogs", "eels")


def make_architecture(folder: Path, kind: str, **config: object) -> Path:
    """Make a folder with random weights of an architecture, without a tokenizer."""
    import torch
    import transformers

    name, described = ARCHITECTURES[kind]
    made = transformers.AutoConfig.for_model(kind, **described, **config)
    torch.manual_seed(0)
    getattr(transformers, name)(made).save_pretrained(folder)
    if kind == "vit":
        described = {"image_processor_type": "ViTImageProcessor"}
        _write(
            folder / "preprocessor_config.json",
            described | {"size": dict.fromkeys(("height", "width"), 16)},
        )
    return folder


def make_images(folder: Path, classes: Sequence[str] = CLASSES, each: int = 4) -> Path:
    """Make a folder with images of several sizes and modes for each class."""
    from PIL import Image

    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for place in range(each):
            color = (90 * number, 20 * place, 200 - 50 * number)
            image = Image.new("RGB", (20 + place, 24), color)
            kind = ("png", "jpg", "bmp", "webp")[place % 4]
            (image.convert("L") if place == 0 else image).save(folder / name / f"{place}.{kind}")
    return folder


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _byte_level(folder: Path) -> None:
    """As Qwen's: byte-level BPE, with a chat template and tokens that were added later."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(LINES, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fast.add_special_tokens([AddedToken(one, special=True) for one in special])
    fast.add_tokens(["<think>"])
    fast.save(str(folder / "tokenizer.json"))
    model = json.loads(fast.to_str())["model"]
    _write(folder / "vocab.json", model["vocab"])
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    added = {one: fast.token_to_id(one) for one in [*special, "<think>"]}
    _write(folder / "added_tokens.json", added)
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write(folder / "special_tokens_map.json", tokens)
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 64, **tokens},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _word_piece(folder: Path) -> None:
    """As BERT's: nothing but a list of words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted({word for line in LINES for word in line.lower().split()})
    words += ["don", "'", "t", ",", "they", "dogs", "?", "##s", *(f"##{one}" for one in range(10))]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(words)) + "\n")
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "eos_token": "[SEP]"},
    )


def _sentence_piece(folder: Path) -> None:
    """As T5's: a model of sentencepiece, and the same as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    marks = sorted({f"▁{word}" for line in LINES for word in line.split()})
    letters = sorted({letter for line in LINES for letter in line if letter != " "})
    pieces += [(one, -2.0 - place / 10) for place, one in enumerate(["▁", *letters, *marks])]
    described = sentencepiece.ModelProto()
    for number, (piece, score) in enumerate(pieces):
        entry = described.pieces.add()
        entry.piece, entry.score = piece, score
        entry.type = (3, 3, 2)[number] if number < 3 else 1
    described.trainer_spec.model_type = 1
    (folder / "spiece.model").write_bytes(described.SerializeToString())
    fast = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    fast.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 1)]
    )
    fast.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **tokens},
    )
