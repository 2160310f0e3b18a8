"""The model families of the memory benchmark, by name and size; no torch."""

from typing import Any

SEQUENCE = 192
_OF_LANGUAGE = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 8000,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "qwen2": {  # its input and output embeddings are one
        "model_type": "qwen2",
        "vocab_size": 16000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "vocab_size": 6000,
        "hidden_size": 288,
        "intermediate_size": 1000,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 48,
        "sliding_window": None,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 9000,
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 8,
        "n_positions": 256,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 7000,
        "hidden_size": 320,
        "intermediate_size": 1280,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
    },
}
FAMILIES = (*_OF_LANGUAGE, "bert", "vit", "little_gpt", "residual")


def config_of(family: str) -> dict[str, Any] | None:
    """Return the config.json of a language model of transformers; None for what is built by a function."""
    config = _OF_LANGUAGE.get(family)
    return None if config is None else {"max_position_embeddings": 512, **config}
