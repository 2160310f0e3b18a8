"""A model that gets its values on ranks, spread in several ways."""

import hashlib
import random
from typing import Any, cast

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.train.models.meta_init import build_on_rank_0, build_whole, is_on_meta
from torchmuster.train.seeds import seed_everything
from torchmuster.train.strategies.choose import build_strategy
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.world import World


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, tied weights, a buffer, and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        layers = [nn.Linear(6, 6) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.randn(3) * 0.5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        layers[1].requires_grad_(False)
        nn.init.trunc_normal_(layers[2].weight, std=0.02)
        self.register_buffer("angles", torch.arange(5) / 5, persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        whole: torch.Tensor = self.head(x) * self.scale.sum() * self.get_buffer("angles").sum()
        return whole


def digests(world: World, seed: int) -> dict[str, str]:
    """Return a digest of all values for each way to spread the model."""
    found = {}
    for way in (
        "single",
        "ddp",
        "fsdp",
        "offload",
        *(["hybrid"] if world.world_size % 2 == 0 else []),
    ):
        model = _spread(way, world, seed)
        assert not is_on_meta(model)
        _assert_it_trains(model)
        found[way] = _digest(_spread(way, world, seed))
    return found


class Drawn(nn.Module):
    """Values that are drawn with Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.python = nn.Parameter(torch.tensor([random.random(), random.random()]))
        self.numpy = nn.Parameter(torch.from_numpy(numpy.random.rand(2)))


def drawn(world: World) -> tuple[list[list[float]], bool]:
    """Return values drawn while building, and whether this rank's random numbers then go on as before."""
    seed_everything(0, world)
    expected = random.random(), float(numpy.random.rand())
    seed_everything(0, world)
    model = build_on_rank_0(Drawn, world, seed=0)
    goes_on = (random.random(), float(numpy.random.rand())) == expected
    model = build_strategy("fsdp", world).prepare(model)
    values = [one.full_tensor().tolist() for one in model.parameters() if isinstance(one, DTensor)]
    return values, goes_on


class ReadsItsValues(nn.Linear):
    """Cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = float(self.weight.detach().abs().max())


def whole_everywhere(world: World) -> list[list[float]]:
    """Return the values of a model that every rank has to build whole."""
    model = build_on_rank_0(ReadsItsValues, world, seed=world.global_rank)
    assert not is_on_meta(model)
    model = build_strategy("fsdp", world).prepare(model)
    return [one.full_tensor().tolist() for one in model.parameters() if isinstance(one, DTensor)]


def _spread(way: str, world: World, seed: int) -> nn.Module:
    if way in ("single", "ddp"):
        model = build_whole(Uneven, seed=seed)
        return build_strategy("ddp", world).prepare(model) if way == "ddp" else model
    model = build_on_rank_0(Uneven, world, seed=seed)
    assert is_on_meta(model) != world.is_first
    offload = way == "offload"
    sharding = Sharding(kind="hybrid_shard", shard_size=world.world_size // 2)
    strategy = build_strategy(
        "fsdp", world, sharding=sharding if way == "hybrid" else Sharding(cpu_offload=offload)
    )
    sharded: Any = strategy.prepare(model)
    assert sharded.head.weight is sharded.embedding.weight
    return cast(nn.Module, sharded)


def _assert_it_trains(model: nn.Module) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(torch.arange(11)), torch.arange(11))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.removeprefix("module.").encode())
        digest.update(bytes(whole.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()
