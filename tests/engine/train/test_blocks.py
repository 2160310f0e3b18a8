"""The repeated layers of a model."""

import pytest
import torch
from torch import nn

from torchmuster.train.models.blocks import repeated_blocks

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]


class Layer(nn.Module):
    def __init__(self, width: int = 8, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def layers(count: int, kind: type[Layer] = Layer, **how: int) -> nn.ModuleList:
    return nn.ModuleList(kind(**how) for _ in range(count))


def test_layers_of_a_transformer_are_found_whatever_they_are_wrapped_in() -> None:
    listed = layers(3)
    model = Model(embedding=nn.Embedding(9, 8), body=Model(layers=listed), head=nn.Linear(8, 9))
    assert repeated_blocks(model) == list(listed)
    assert repeated_blocks(Model(base_model=Model(model=model))) == list(listed)


def test_a_model_without_repeated_layers_has_none() -> None:
    assert repeated_blocks(Model(first=nn.Linear(2, 2), second=nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())) == []


def test_models_of_transformers_with_and_without_lora() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = list(model.model.layers)
    assert repeated_blocks(model) == expected
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert repeated_blocks(adapted) == expected
