"""How LoRA's matrices are called, in a checkpoint and in a file that peft reads."""

import re

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# peft's name for the only adapter of a model, which is not in its files.
_DEFAULT = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")


def name_in_adapter(name: str) -> str | None:
    """Return the name that a weight of a model with LoRA has in peft's file; None for one of the base model."""
    if ".lora_" not in name:
        return None
    return _DEFAULT.sub(r"\1", name)
