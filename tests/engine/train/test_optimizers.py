"""Which parameters decay, and which ones Muon updates."""

import pytest
import torch
from torch import nn

from torchmuster.train.optimizers import MuonWithAdamW, optimizer_named, parameter_groups

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


def test_muon_updates_the_matrices_of_the_layers_and_adamw_all_others() -> None:
    model = _llama()
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.1, muon=True)
    assert [group["use_muon"] for group in groups] == [True, False, False]
    assert all(".layers." in name for name in _names(model, groups[0]["params"]))
    assert len(groups[0]["params"]) == 2 * 7
    assert _names(model, groups[1]["params"]) == {"model.embed_tokens.weight", "lm_head.weight"}
    optimizer = optimizer_named("muon", learning_rate=0.1, weight_decay=0.1)(groups)
    assert isinstance(optimizer, MuonWithAdamW)
    assert [group.get("fused") for group in optimizer.param_groups] == [None, True, True]


def test_without_repeated_layers_the_first_and_last_matrix_are_not_hidden() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Bilinear(8, 8, 8), nn.Tanh())
    model.append(nn.Sequential(nn.Conv1d(8, 8, 3), nn.Embedding(3, 8)))
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.1, muon=True)
    assert not any(group["use_muon"] for group in groups)


def test_frozen_parameters_are_left_out() -> None:
    model = _gpt2()
    model.requires_grad_(False)
    head = nn.Parameter(torch.zeros(2, 2))
    model.register_parameter("extra", head)
    [group] = parameter_groups(model, learning_rate=1.0, weight_decay=0.1)
    assert group["params"] == [head]
