"""Models that are built without memory and get their values later."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion
from torch import nn

from live_bytes import live_bytes
from torchmuster.errors import Impossible
from torchmuster.train.models.deferred import (
    copied,
    deferred,
    is_deferred,
    materialise,
    move_all_but_parameters,
)
from torchmuster.train.models.pretrained import load_shards

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]
CPU = torch.device("cpu")


def built(build: Any, seed: int = 0) -> Any:
    with deferred():
        model = build()
    assert is_deferred(model)
    assert all(one.is_meta for one in model.parameters())
    materialise(model, device=CPU, seed=seed)
    assert not is_deferred(model)
    return model


class Everything(nn.Module):
    """Each line is a way in which people give values to their parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(300, 40) * 0.02)
        self.copied = nn.Parameter(self.raw.detach().clone())
        self.doubled = nn.Linear(40, 300, bias=False)
        with torch.no_grad():
            self.doubled.weight.copy_(self.raw * 2)
        self.embedding = nn.Embedding(50, 40, padding_idx=3)
        self.tied = nn.Linear(40, 50, bias=False)
        self.tied.weight = self.embedding.weight
        self.truncated = nn.Parameter(torch.empty(100, 100))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.6)
        self.orthogonal = nn.Parameter(torch.empty(16, 16))
        nn.init.orthogonal_(self.orthogonal)
        self.partly = nn.Linear(40, 40)
        self.partly.weight.data[0].fill_(7)
        self.partly.bias.data[::2].zero_()
        self.never_written = nn.Parameter(torch.empty(1000))
        self.thirds = nn.Parameter(torch.ones(3, dtype=torch.bfloat16) / 3)
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("angles", 1 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("constant", torch.tensor([1.0, 2.0]), persistent=False)
        self.register_buffer("mixed", torch.tensor([1.0, 2.0]) * self.raw.detach()[0, :2])
        self.mask = torch.ones(4, 4).tril()  # neither parameter nor buffer
        self.masks = [torch.ones(2), {"low": (torch.zeros(2), torch.arange(2), "x")}]
        self.masks.append(self.masks)
        self.some = (self.frozen, [self.tied.weight])
        self.rates = [float(one) for one in torch.linspace(0, 0.2, 3)]
        self.list_of_rates = torch.linspace(0, 0.2, 3).tolist()
        self.places = torch.arange(6)[torch.arange(6) % 2 == 1].tolist()
        torch.set_default_dtype(torch.float64)
        self.register_buffer("doubles", torch.arange(3) / 2)
        torch.set_default_dtype(torch.float32)


def test_every_way_to_give_values_keeps_its_meaning() -> None:
    model = built(Everything)
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["frozen"]
    model.requires_grad_(False)
    assert model.raw.std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.copied, model.raw)
    assert torch.equal(model.doubled.weight, 2 * model.raw)
    assert model.tied.weight is model.embedding.weight
    assert model.embedding.weight[3].eq(0).all()
    assert model.embedding.weight.std() == pytest.approx(1, rel=0.1)
    assert model.truncated.abs().max() <= 0.6
    assert model.truncated.std() == pytest.approx(0.32, abs=0.02)
    assert torch.allclose(model.orthogonal @ model.orthogonal.T, torch.eye(16), atol=1e-5)
    assert model.partly.weight[0].eq(7).all()
    assert model.partly.weight[1:].abs().max() < 40**-0.5
    assert model.partly.bias[::2].eq(0).all()
    assert model.partly.bias[1::2].ne(0).all()
    assert model.never_written.eq(0).all()  # the same on every rank
    assert torch.equal(model.thirds, torch.full((3,), 1 / 3, dtype=torch.bfloat16))
    first, second = (one.linear1.weight for one in model.encoder.layers)
    assert torch.equal(first, second)  # torch makes them as copies
    assert first is not second
    assert torch.allclose(model.angles, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert model.constant.tolist() == [1, 2]
    assert torch.equal(model.mixed, torch.tensor([1.0, 2.0]) * model.raw[0, :2])
    assert torch.equal(model.mask, torch.ones(4, 4).tril())
    assert model.masks[0].tolist() == [1, 1]
    low = model.masks[1]["low"]
    assert [low[0].tolist(), low[1].tolist(), low[2]] == [[0, 0], [0, 1], "x"]
    assert model.some[0] is model.frozen
    assert model.some[1][0] is model.tied.weight
    assert model.rates == pytest.approx([0, 0.1, 0.2])
    assert model.list_of_rates == pytest.approx([0, 0.1, 0.2])
    assert model.places == [1, 3, 5]
    assert model.doubles.dtype == torch.float64
    assert set(model.state_dict()) == set(Everything().state_dict())


def test_values_follow_the_seed_and_leave_the_caller_s_random_numbers_alone() -> None:
    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = built(two, 1), built(two, 1), built(two, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)


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
    model = built(lambda: AutoModelForCausalLM.from_config(config))
    plain = AutoModelForCausalLM.from_config(config)
    for name, expected in plain.state_dict().items():
        found = model.state_dict()[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.float().std() == pytest.approx(float(expected.float().std()), abs=0.003), name
    for name, expected in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), expected), name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied is (kind == "qwen2")
    assert torch.isfinite(model(input_ids=torch.arange(5)[None]).logits).all()


def test_one_parameter_at_a_time_is_whole() -> None:
    size = 1000 * 100 * 4

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Three steps, of which never more than two need memory at once.
            self.weights = nn.ParameterList((torch.randn(1000, 100) + 1) * 2 for _ in range(6))

    with live_bytes() as found:
        with deferred():
            model = Made()
        materialise(model, device=CPU, seed=0)
        assert found.live == pytest.approx(6 * size, rel=0.01)
        assert found.peak <= 7 * size * 1.01


def test_a_value_that_depends_on_random_numbers_cannot_be_had_while_building(
    snapshot: SnapshotAssertion,
) -> None:
    with pytest.raises(Impossible) as caught, deferred():
        nn.Parameter(torch.randn(3)).sum().item()
    assert caught.value.why.startswith("aten._local_scalar_dense.default ")
    assert caught.value.why.endswith(f"{__file__}:{_line_of('.sum().item()')}")
    assert caught.value.what == snapshot
    assert caught.value.fix == snapshot


def test_a_part_that_nobody_recorded_is_named(snapshot: SnapshotAssertion) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(Impossible) as caught:
        materialise(model, device=CPU, seed=0)
    assert caught.value.what.startswith("1.weight ")
    assert caught.value == snapshot


def test_tensors_in_lists_that_will_have_no_values_are_named(snapshot: SnapshotAssertion) -> None:
    model: Any
    with deferred():
        model = nn.Sequential(nn.Linear(2, 2))
    model[0].masks = [torch.ones(2, device="meta")]
    with pytest.raises(Impossible) as caught:
        materialise(model, device=CPU, seed=0)
    assert caught.value.what.startswith("0.masks.0 ")
    assert caught.value == snapshot
    with deferred():
        model = nn.Sequential(nn.Linear(2, 2))
    model[0].all = {"weight": model[0].weight}
    model[0].weight = nn.Parameter(model[0].weight.data)  # as sharding does
    with pytest.raises(Impossible) as caught:
        materialise(model, device=CPU, seed=0)
    assert caught.value.what.startswith("0.all.weight ")
    assert caught.value == snapshot


def test_all_but_parameters_can_be_moved() -> None:
    model = built(Tied)
    model.masks = (torch.ones(2),)
    move_all_but_parameters(model, torch.device("meta"))
    assert all(one.is_meta for one in (model.count, model.steps, *model.masks))
    assert not any(one.is_meta for one in model.parameters())


def test_values_of_another_deferred_model_are_not_known(snapshot: SnapshotAssertion) -> None:
    with deferred():
        first = nn.Linear(2, 2)
    with deferred():
        second = nn.Linear(2, 2)
        second.weight.data.copy_(first.weight)
    with pytest.raises(Impossible) as refused:
        materialise(second, device=CPU, seed=0)
    assert refused.value == snapshot


def test_torch_is_as_before_after_a_failure() -> None:
    truncated = nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), deferred():
        _ = 1 / 0
    assert nn.init._no_grad_trunc_normal_ is truncated
    assert not nn.Linear(2, 2).weight.is_meta
    assert not nn.modules.module._global_parameter_registration_hooks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("steps", torch.arange(3), persistent=False)


def test_weights_come_from_files_and_the_rest_from_the_model(tmp_path: Path) -> None:
    weights = {
        "first.weight": torch.rand(4, 3),
        "first.bias": torch.rand(4),
        "count": torch.tensor(9),
    }
    save_file(weights, tmp_path / "model.safetensors")
    with deferred():
        model = Tied()
    load_shards(model, [tmp_path / "model.safetensors"])
    materialise(model, device=CPU, seed=0)
    assert torch.equal(model.second.weight, weights["first.weight"])
    assert torch.equal(model.first.bias, weights["first.bias"])
    assert model.count == 9
    assert torch.equal(model.get_buffer("steps"), torch.arange(3))


def test_names_of_weights_may_differ_and_some_may_be_new(tmp_path: Path) -> None:
    save_file({"old": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with deferred():
        model = nn.Linear(3, 4)
    load_shards(
        model,
        [tmp_path / "model.safetensors"],
        name_in_files=lambda name: "old" if name == "weight" else None,
    )
    materialise(model, device=CPU, seed=0)
    assert model.weight.eq(1).all()
    assert model.bias.ne(0).all()


def test_weights_of_another_model_are_refused_with_all_that_is_wrong(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    save_file(
        {"first.weight": torch.zeros(4, 2), "third.bias": torch.zeros(1), "count": torch.tensor(1)},
        tmp_path / "model.safetensors",
    )
    with deferred():
        model = Tied()
    with pytest.raises(Impossible) as caught:
        load_shards(model, [tmp_path / "model.safetensors"])
    for name in ("first.bias", "third.bias", "first.weight"):
        assert name in caught.value.why
    assert caught.value == snapshot
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    with pytest.raises(Impossible, match=r"broken\.safetensors cannot be read"):
        load_shards(model, [tmp_path / "broken.safetensors"])


def _line_of(words: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def test_a_copy_gets_the_same_values_and_leaves_the_first_without_memory() -> None:
    with deferred():
        model = Everything()
    copy = copied(model)
    assert isinstance(copy, Everything)
    assert copy.tied.weight is copy.embedding.weight is not model.embedding.weight
    materialise(copy, device=CPU, seed=3)
    assert is_deferred(model)
    assert not is_deferred(copy)
    materialise(model, device=CPU, seed=3)
    for name, one in model.state_dict().items():
        assert torch.equal(one, copy.state_dict()[name]), name


def test_a_truncated_normal_with_keyword_arguments_is_drawn_with_them() -> None:
    # As timm and others do, who call torch's function under its private name.
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(100, 100))
            nn.init._no_grad_trunc_normal_(
                self.weight, mean=3.0, std=0.5, a=2.4, b=3.6, generator=torch.Generator()
            )

    models = []
    for _ in range(2):
        with deferred():
            model = Model()
        materialise(model, device=CPU, seed=1)
        models.append(model)
    weight, again = (one.weight.detach() for one in models)
    assert (weight - 3.0).abs().max() <= 0.6
    assert weight.std() == pytest.approx(0.32, abs=0.02)
    assert torch.equal(weight, again)
