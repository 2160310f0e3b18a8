"""Which parameters decay."""

import pytest
from torch import nn

from torchmuster.train.optimizers import parameter_groups

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer

pytestmark = [pytest.mark.engine, pytest.mark.integrations]


def _llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes))
    return model


def _names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    ids = {id(one) for one in parameters}
    return {name for name, one in model.named_parameters() if id(one) in ids}


@pytest.mark.parametrize("model", [_llama(), _gpt2()], ids=["llama", "gpt2"])
def test_the_parameters_that_decay_are_those_of_transformers(model: nn.Module) -> None:
    decayed, plain = parameter_groups(model, learning_rate=1.0, weight_decay=0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    assert _names(model, decayed["params"]) == theirs & {n for n, _ in model.named_parameters()}
