"""A model that gets its values on ranks, spread in several ways."""

import hashlib
import random
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.models.deferred import deferred, is_deferred, materialise
from torchmuster.train.models.pretrained import load_shards
from torchmuster.train.seeds import seed_everything
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
    for way in ("single", "ddp", "fsdp", *(["hybrid"] if world.world_size % 2 == 0 else [])):
        model = _spread(way, world, seed)
        assert not is_deferred(model)
        _assert_it_trains(model)
        found[way] = _digest(_spread(way, world, seed))
    return found


def shards_differ(world: World) -> list[float]:
    """Return the sum of this rank's shard of each layer; the layers have equal shapes."""
    model = _spread("fsdp", world, 0)
    return [float(_local(one.weight).double().sum()) for one in model.layers]  # type: ignore[union-attr]


def from_files(world: World, folder: str) -> str:
    """Return the digest of a sharded model with weights that were read from files."""
    with deferred():
        model = Uneven()
    load_shards(model, sorted(Path(folder).glob("*.safetensors")))
    _shard(model, None)
    materialise(model, device=world.device, seed=5)
    _assert_it_trains(model)
    with deferred():
        model = Uneven()
    _shard(model, None)
    load_shards(model, sorted(Path(folder).glob("*.safetensors")))
    materialise(model, device=world.device, seed=6)
    return _digest(model)


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
    with deferred():
        model = Drawn()
    goes_on = (random.random(), float(numpy.random.rand())) == expected
    _shard(model, None)
    materialise(model, device=world.device, seed=0)
    values = [one.full_tensor().tolist() for one in model.parameters() if isinstance(one, DTensor)]
    return values, goes_on


def _spread(way: str, world: World, seed: int) -> nn.Module:
    with deferred():
        model = Uneven()
    if way == "fsdp":
        _shard(model, None)
    elif way == "hybrid":
        _shard(
            model,
            init_device_mesh("cpu", (2, world.world_size // 2), mesh_dim_names=("copy", "shard")),
        )
    materialise(model, device=world.device, seed=seed)
    assert model.head.weight is model.embedding.weight
    return DistributedDataParallel(model) if way == "ddp" else model


def _shard(model: nn.Module, mesh: DeviceMesh | None) -> None:
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.removeprefix("module.").encode())
        digest.update(bytes(whole.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()
