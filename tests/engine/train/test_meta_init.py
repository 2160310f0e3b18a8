"""Models that are built without memory for their parameters."""

import random
from typing import Any

import numpy
import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.models.meta_init import (
    build_on_meta,
    build_on_rank_0,
    build_whole,
    is_on_meta,
)
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.single import Single
from torchmuster.train.world import World, join_world

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]


class Everything(nn.Module):
    """Each line is a way in which people make parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(300, 40) * 0.02)
        self.copied = nn.Parameter(self.raw.detach().clone())
        self.embedding = nn.Embedding(50, 40, padding_idx=3)
        self.tied = nn.Linear(40, 50, bias=False)
        self.tied.weight = self.embedding.weight
        twice = nn.Parameter(torch.rand(2))
        self.first, self.second = twice, twice
        self.truncated = nn.Parameter(torch.empty(100, 100))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.6)
        nn.init.orthogonal_(self.tied.weight)
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.frozen.note = "mine"  # type: ignore[attr-defined]
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("angles", 1 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("constant", torch.tensor([1.0, 2.0]), persistent=False)
        self.mask = torch.ones(4, 4).tril()  # neither parameter nor buffer
        self.rates = torch.linspace(0, 0.2, 3).tolist()


def test_parameters_have_no_memory_and_everything_else_is_real() -> None:
    model: Any = build_on_meta(Everything)
    plain = Everything()
    assert all(parameter.is_meta for parameter in model.parameters())
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same = (found.shape, found.dtype, found.requires_grad)
        assert same == (expected.shape, expected.dtype, expected.requires_grad), name
    assert model.tied.weight is model.embedding.weight
    assert model.first is model.second
    assert model.frozen.note == "mine"
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert torch.equal(model.mask, plain.mask)
    assert model.rates == plain.rates
    assert set(model.state_dict()) == set(plain.state_dict())


def test_a_model_that_needs_values_of_parameters_is_built_whole() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = float(self.weight.detach().abs().max())

    class Mixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mixed", torch.tensor([1.0, 2.0]) * self.weight.detach()[0])

    for build in (Scaled, Mixed):
        assert not is_on_meta(build_on_meta(build))


def test_values_are_those_of_plain_torch_with_the_same_seed() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(20, 20)
        layer.bias.data.fill_(random.random() + float(numpy.random.rand()))
        return layer

    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    plain = build().state_dict()
    before = torch.get_rng_state(), random.getstate(), float(numpy.random.rand(1)[0])
    numpy.random.seed(5)
    numpy.random.rand()
    found = build_whole(build, seed=5).state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert float(numpy.random.rand(1)[0]) == before[2]
    other = build_whole(build, seed=6).state_dict()
    assert not torch.equal(other["weight"], found["weight"])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_models_of_transformers(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind == "qwen2",
        dtype="bfloat16" if kind == "llama" else "float32",
    )
    model: Any = build_on_meta(lambda: AutoModelForCausalLM.from_config(config))
    plain = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, expected in plain.state_dict().items():
        found = model.state_dict()[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    for name, expected in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), expected), name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied is (kind == "qwen2")


@pytest.fixture
def world() -> Any:
    with join_world("cpu") as world:
        yield world


@pytest.mark.parametrize("strategy", [Single, Ddp])
def test_a_model_whose_values_nobody_has_is_refused(
    strategy: Any, world: World, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        strategy(world).prepare(build_on_meta(lambda: nn.Linear(2, 2)))
    assert refused.value == snapshot(name="refused")


def test_rank_0_has_values(world: World) -> None:
    assert not is_on_meta(build_on_rank_0(lambda: nn.Linear(2, 2), world, seed=0))
