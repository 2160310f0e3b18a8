"""What the strategies do to a model, its gradients and its state."""

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rank_programs.parity import Case as ParityCase
from rank_programs.parity import Language, global_batch, language_model, model_is_tied, token_losses
from torchmuster.train.models.blocks import recompute_blocks
from torchmuster.train.models.meta_init import build_for
from torchmuster.train.precision import BF16, FP32, Precision
from torchmuster.train.strategies.choose import build_strategy, memory_of_each_rank
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World

_BATCH = global_batch(
    ParityCase(strategy="any", rounds=1, counts="equal", clip_norm=None), ranks=1, number=0
)[0]


def _strategies(world: World, precision: Precision = FP32) -> list[Strategy]:
    ways: list[Strategy] = [
        build_strategy("ddp", world),
        build_strategy("fsdp", world, precision=precision),
    ]
    if world.world_size == 1:
        ways.append(build_strategy("single", world))
    return ways


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train on the same batch on all ranks, and return the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = token_losses(model, _BATCH).mean()
        torch.autograd.backward(loss)
        optimizer.step()
    return loss.item()


def _copied(value: Any, whole: bool) -> Any:
    """Copy a state, so that further training does not change it; shards are made whole if asked."""
    if isinstance(value, dict):
        return {key: _copied(one, whole) for key, one in value.items()}
    if isinstance(value, DTensor) and whole:
        return value.full_tensor().clone()  # of one rank it is the shard itself
    return value.clone() if isinstance(value, torch.Tensor) else value


def states(world: World) -> dict[str, Any]:
    """Save under wrappers, load in three ways, and go on training."""
    told: dict[str, Any] = {}
    for strategy in _strategies(world):
        raw = language_model(1)
        raw.blocks[0] = checkpoint_wrapper(raw.blocks[0])
        model = strategy.prepare(raw)
        optimizer = _adam(model)
        _train(model, optimizer, 2)
        optimizer.zero_grad()
        state = strategy.state_dict(model, optimizer)
        saved, whole = _copied(state, whole=False), _copied(state, whole=True)
        expected = _train(model, optimizer, 1)
        losses = []
        for state in (saved, whole):
            other = strategy.prepare(language_model(2))
            other_optimizer = _adam(other)
            given = _copied(state, whole=False)
            strategy.load_state_dict(other, given, other_optimizer)
            assert given.get("model", {}).keys() == state.get("model", {}).keys()
            losses.append(_train(other, other_optimizer, 1))
        told[strategy.name] = {
            "names": sorted(saved["model"]),
            "optimizer names": sorted(saved["optimizer"]["state"]),
            "sharded": any(isinstance(one, DTensor) for one in saved["model"].values()),
            "losses": losses,
            "expected": expected,
        }
    return told


def gradients(world: World) -> dict[str, Any]:
    """Norms, and whether gradients are finite, with one bad number on the last rank."""
    told: dict[str, Any] = {}
    for strategy in _strategies(world):
        model = strategy.prepare(nn.Linear(2, 3))
        parameters = list(model.parameters())
        seen: dict[str, Any] = {}
        # The last comes after DDP has laid its buckets out anew.
        for name, value in {
            "good": 1.0,
            "huge": 3e38,
            "nan": float("nan"),
            "inf": float("inf"),
        }.items():
            model.zero_grad()
            own = value if world.global_rank == world.world_size - 1 else 1.0
            # Only the first row's gradient is bad, so only one rank has it in its shard.
            (model(torch.ones(1, 2)) * torch.tensor([own, 1.0, 1.0])).sum().backward()
            seen[name] = not strategy.measure_gradients(parameters, norm=False).found_inf
            if name in ("good", "nan"):
                seen[f"norm of {name}"] = _norm(strategy, parameters)
        told[strategy.name] = seen
    return told


class Adapted(nn.Module):
    """Frozen half-size weights with a small trained part beside them, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).bfloat16()
        self.layers.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = torch.relu(layer(x.bfloat16()).float() + adapter(x.float()))
        return x


class Adapter(nn.Module):
    """The same in one block: frozen and trained parameters are sharded together."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.low = nn.Linear(8, 2)
        self.high = nn.Linear(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.high(self.low(x)))


def frozen(world: World) -> dict[str, Any]:
    """Train what is not frozen; return the losses, and whether the rest stayed as it was."""
    told: dict[str, Any] = {}
    for strategy in _strategies(world):
        for build_model in (Adapted, lambda: nn.Sequential(*(Adapter() for _ in range(3)))):
            torch.manual_seed(3)
            model = strategy.prepare(build_model())
            before = _copied(strategy.state_dict(model)["model"], whole=True)
            optimizer = _adam(model)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 8)) - 1).square().mean()
                torch.autograd.backward(loss)
                measured = strategy.measure_gradients(list(model.parameters()), norm=False)
                assert not measured.found_inf
                optimizer.step()
                losses.append(loss.item())
            after = _copied(strategy.state_dict(model)["model"], whole=True)
            changed = sorted(name for name in after if not after[name].equal(before[name]))
            told.setdefault(strategy.name, []).append({"losses": losses, "changed": changed})
    return told


def half_precision(world: World) -> dict[str, Any]:
    """Train in bf16 with the loop's autocast; say in which type things are."""
    told: dict[str, Any] = {}
    for strategy in _strategies(world, BF16):
        model = strategy.prepare(language_model(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with BF16.autocast(world.device):
                logits = model(_BATCH[0])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), _BATCH[1].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        told[strategy.name] = {
            "losses": losses,
            "logits": str(logits.dtype),
            "weights": {str(one.dtype) for one in model.parameters()},
            "gradients": {
                str(one.grad.dtype) for one in model.parameters() if one.grad is not None
            },
        }
    return told


def normalized_batches(world: World) -> dict[str, Any]:
    """Train a model with batch normalization in bf16; say what it came to, and what is whole between steps."""
    told: dict[str, Any] = {}
    for strategy in _strategies(world, BF16):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)]
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Sequential(*blocks), nn.Linear(8, 1))
        rows = torch.randn(16, 8)
        recompute_blocks(model)
        prepared = strategy.prepare(model)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with BF16.autocast(world.device):
                loss = prepared(rows).float().square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        told[strategy.name] = {
            "losses": losses,
            "means": prepared.get_buffer(
                "module.0.running_mean" if strategy.name == "ddp" else "0.running_mean"
            ).tolist(),
            "sharded": all(isinstance(one, DTensor) for one in prepared.parameters()),
        }
    return told


class Tied(nn.Module):
    """Blocks of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded_blocks(world: World) -> dict[str, Any]:
    """Say which modules are sharded on their own, and how copies are laid out."""
    whole = build_strategy("fsdp", world).prepare(Language())
    tied: Any = build_strategy("fsdp", world).prepare(Tied())
    tied(torch.ones(1, 4)).sum().backward()
    return {
        "language": [name for name, one in whole.named_modules() if isinstance(one, FSDPModule)],
        "tied": [name for name, one in tied.named_modules() if isinstance(one, FSDPModule)],
        "still tied": tied.blocks[0].weight is tied.blocks[1].weight,
    }


def memory(world: World) -> int | None:
    return memory_of_each_rank(world)


class Half(nn.Module):
    """A model that uses its second part only where it is told to."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.spare = nn.Linear(2, 2)
        self.more = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(more))

    def forward(self, x: torch.Tensor, all_of_it: bool) -> Any:
        y = self.used(x)
        return self.spare(y) if all_of_it else y


def unused(world: World, ranks_that_use: list[int], more: int, find: bool) -> list[float]:
    """Two steps in which only some ranks use the whole model; the check is made after the first."""
    strategy = build_strategy("ddp", world, find_unused_parameters=find)
    model = strategy.prepare(Half(more))
    norms = []
    for number in range(2):
        model.zero_grad()
        model(torch.ones(1, 2), world.global_rank in ranks_that_use).sum().backward()
        if number == 0:
            strategy.check_gradients(model)
        norms.append(_norm(strategy, list(model.parameters())))
    return norms


def _norm(strategy: Strategy, parameters: list[nn.Parameter]) -> float:
    norm = strategy.measure_gradients(parameters, norm=True).norm
    assert norm is not None
    return norm.item()


def values_of_built_models(world: World) -> dict[str, Any]:
    """Build for every strategy and prepare; return checksums of what comes out."""
    strategies = {
        "ddp": build_strategy("ddp", world),
        "fsdp": build_strategy("fsdp", world),
        "offload": build_strategy("fsdp", world, sharding=Sharding(cpu_offload=True)),
        "another seed": build_strategy("fsdp", world),
    }
    if world.world_size == 1:
        strategies["single"] = build_strategy("single", world)
    told: dict[str, Any] = {}
    for name, strategy in strategies.items():
        raw = build_for(strategy.name, Language, world, seed=6 if name == "another seed" else 5)
        model = strategy.prepare(raw)
        state = _copied(strategy.state_dict(model)["model"], whole=True)
        told[name] = zlib.crc32(repr([state[key].tolist() for key in sorted(state)]).encode())
        loss = _train(model, _adam(model), 1)
        assert model_is_tied(model)
        told[f"{name} loss"] = round(loss, 5)
    return told
