"""LoRA: only small matrices are trained, the targets are chosen, peft reads what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.models.lora import add_lora, save_adapters
from torchmuster.train.models.parameters import peft_config

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]

ALONE = made_up_world()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.first(inputs))
        return logits


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def trained(model: nn.Module) -> set[str]:
    return {
        name.partition(".lora_")[0].rpartition(".")[2]
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def test_the_targets_of_a_known_kind_are_chosen() -> None:
    adapted = add_lora(llama(), r=4)
    assert trained(adapted) == {"q_proj", "v_proj"}
    config = peft_config(nn.Sequential(adapted))
    assert (config.r, config.lora_alpha) == (4, 8)


def test_all_linear_layers_and_layers_that_are_trained_whole() -> None:
    adapted = add_lora(llama(), r=2, target_modules="all-linear", modules_to_save=["lm_head"])
    of_lora = {name for name in trained(adapted) if not name.startswith("weight")}
    assert of_lora >= {*(f"{one}_proj" for one in "qkvo"), "gate_proj", "up_proj", "down_proj"}


def test_a_layer_to_train_whole_that_is_not_there_is_refused() -> None:
    with pytest.raises(Impossible) as error:
        add_lora(llama(), r=2, modules_to_save=["lm_haed"])
    assert "lm_haed" in error.value.why
    assert " lm_head" in error.value.why


def test_targets_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(Impossible) as error:
        add_lora(Two(), r=2, target_modules=["q_proj"])
    assert "q_proj" in error.value.why
    assert error.value.why.endswith(" first, second")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["all-linear"]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
    ],
)
def test_peft_reads_what_is_saved(options: dict[str, Any], tmp_path: Path) -> None:
    import peft
    import safetensors.torch

    model = add_lora(llama(), r=2, **options)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn_like(one))
    save_adapters(model, model.state_dict(), tmp_path / "adapters", ALONE)
    assert sorted(one.name for one in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    saved = safetensors.torch.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert set(saved) == set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
