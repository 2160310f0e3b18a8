"""What ranks do with the classic trainers and functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchmuster.distributed import (
    DDPTrainer,
    ProductionTrainer,
    create_distributed_dataloader,
    reduce_mean,
    sync_gradients,
)
from torchmuster.errors import MusterError
from torchmuster.train.world import World


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(samples, 4, generator=generator)
    return TensorDataset(points, (points.sum(1) > 0).long())


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def weights(model: nn.Module) -> list[float]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return torch.cat([one.detach().flatten() for one in inner.parameters()]).tolist()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


CRITERIA: dict[str, Callable[[], Any]] = {
    "cross entropy": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5])),
    "ignoring": lambda: nn.CrossEntropyLoss(ignore_index=0),
    "own": lambda: lambda output, targets: (output[:, 0] - targets).square().mean(),
    "sum": lambda: nn.MSELoss(reduction="sum"),
}


class OneColumn(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        column: torch.Tensor = self.inner(points)[:, 0]
        return column


def train(world: World, samples: int, batch_size: int, epochs: int) -> dict[str, Any]:
    """Train with every criterion; unequal last batches where the numbers do not divide."""
    found = {}
    for name, make in CRITERIA.items():
        model = OneColumn(network()) if name == "sum" else network()
        if not world.is_first:  # DDP begins with rank 0's weights
            for one in model.parameters():
                one.data.zero_()
        trainer = DDPTrainer(model, world.global_rank, world.world_size)
        optimizer = adam(trainer.model)
        data = dataset(samples)
        if name == "sum":
            data = TensorDataset(data.tensors[0], data.tensors[1].float())
        loader = create_distributed_dataloader(
            data, batch_size, world.global_rank, world.world_size
        )
        losses = [trainer.train_epoch(loader, optimizer, make()) for _ in range(epochs)]
        assert isinstance(trainer.model, DistributedDataParallel)
        found[name] = (losses, weights(trainer.model))
    return found


def train_and_save(world: World, folder: str) -> tuple[list[float], list[float]]:
    """Train, save, see that the file is whole on every rank at once, train on."""
    trainer = DDPTrainer(network(), world.global_rank, world.world_size)
    optimizer = adam(trainer.model)
    loader = create_distributed_dataloader(dataset(12), 2)
    trainer.train_epoch(loader, optimizer, nn.CrossEntropyLoss())
    path = Path(folder) / "checkpoint"
    trainer.save_checkpoint(path, 0, optimizer)
    assert [one.name for one in path.parent.iterdir()] == ["checkpoint"]
    saved = weights(trainer.model)
    loss = trainer.train_epoch(loader, optimizer, nn.CrossEntropyLoss())
    return saved, [loss, *weights(trainer.model)]


def load_and_train(world: World, folder: str, per_rank: int) -> Any:
    model = network()
    for one in model.parameters():
        one.data.fill_(world.global_rank)
    trainer = DDPTrainer(model, world.global_rank, world.world_size)
    optimizer = adam(trainer.model)
    epoch = trainer.load_checkpoint(Path(folder) / "checkpoint", optimizer)
    loaded = weights(trainer.model)
    loader = create_distributed_dataloader(dataset(12), per_rank)
    loss = trainer.train_epoch(loader, optimizer, nn.CrossEntropyLoss())
    return epoch, loaded, [loss, *weights(trainer.model)]


def pitfalls(world: World, hostile: str) -> dict[str, Any]:
    """Do what goes wrong in many scripts; return what is said about it."""
    rank, size = world.global_rank, world.world_size
    found: dict[str, Any] = {}
    trainer = DDPTrainer(network(), rank, size)
    optimizer = adam(trainer.model)

    def said(name: str, act: Any) -> None:
        try:
            found[name] = act()
        except MusterError as error:
            found[name] = str(error)

    # torch's own sampler, and nobody calls set_epoch
    sampler: Any = DistributedSampler(dataset(8))
    seen: list[list[float]] = []
    plain = DataLoader(dataset(8), 2, sampler=sampler)

    class Listening(nn.Module):
        def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen[-1] += output[:, 0].tolist()
            return nn.functional.cross_entropy(output, targets)

    still = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    for _ in range(2):
        seen.append([])
        trainer.train_epoch(plain, still, Listening())
    found["orders"] = seen
    # a script that counts epochs itself is believed
    sampler.set_epoch(40)
    seen.append([])
    trainer.train_epoch(plain, still, Listening())
    found["epoch"] = sampler.epoch

    uneven = DataLoader(
        TensorDataset(*(one[: 3 + rank] for one in dataset(8).tensors)), 1, sampler=range(3 + rank)
    )
    said("uneven", lambda: trainer.train_epoch(uneven, optimizer, nn.CrossEntropyLoss()))
    said("hostile", lambda: trainer.load_checkpoint(hostile, optimizer))
    not_an_epoch: Any = said  # a local function cannot be pickled
    said("unpicklable", lambda: trainer.save_checkpoint(f"{hostile}.2", not_an_epoch, optimizer))
    said("unwritable", lambda: trainer.save_checkpoint("/proc/nowhere/file", 0, optimizer))
    said("contradiction", lambda: DDPTrainer(network(), rank, size + 1))
    points: Any = torch.zeros(4, 4)
    alone: Any = DataLoader(points, 2, sampler=range(4))
    said("no targets", lambda: trainer.train_epoch(alone, optimizer, nn.CrossEntropyLoss()))
    return found


def averages(world: World) -> dict[str, Any]:
    rank = world.global_rank
    whole = torch.tensor([rank, 4 * rank], dtype=torch.bfloat16)
    found: dict[str, Any] = {
        "number": reduce_mean(0.1 * rank),
        "tensor": reduce_mean(whole),
        "untouched": whole.tolist(),
        "counts": reduce_mean(torch.tensor([rank, 1])),
        "graph": reduce_mean(torch.ones(1, requires_grad=True)).requires_grad,
    }
    # By hand and by DDP: the same gradients, also of a parameter that one rank alone uses.
    points, targets = (one[rank :: world.world_size] for one in dataset(12).tensors)
    by_hand, by_ddp = RarelyUsed(), RarelyUsed()
    wrapped = DistributedDataParallel(by_ddp, find_unused_parameters=True)
    for model in (by_hand, wrapped):
        loss = nn.functional.cross_entropy(model(points, rank == 0), targets)
        loss.backward()  # type: ignore[no-untyped-call]
    sync_gradients(by_hand)
    found["gradients"] = [
        None if one.grad is None else one.grad.flatten().tolist() for one in by_hand.parameters()
    ]
    found["of DDP"] = [
        None if one.grad is None else one.grad.flatten().tolist() for one in by_ddp.parameters()
    ]
    return found


class RarelyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rarely = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.inner = network()

    def forward(self, points: torch.Tensor, use: bool) -> torch.Tensor:
        output: torch.Tensor = self.inner(points)
        return output * self.rarely if use else output


def produce(world: World, folder: str, precision: str, resume: bool) -> Any:
    """Train 4 epochs, or 2 and then 2 more from the checkpoint; return all that is to be equal."""
    torch.manual_seed(world.global_rank)
    loader = create_distributed_dataloader(dataset(28), 3)
    held_out = create_distributed_dataloader(dataset(7), 2, shuffle=False)
    config = {
        "epochs": 4,
        "learning_rate": 0.05,
        "accumulation": 2,
        "warmup_steps": 2,
        "precision": precision,
        "checkpoint_folder": folder,
        "log_every": 3,
        "tensorboard_folder": None if resume else f"{folder}/curves",
    }
    model = nn.Sequential(nn.BatchNorm1d(4), network(dropout=0.3))
    trainer = ProductionTrainer(model, loader, held_out, config)
    begin = 0
    if resume:
        begin = trainer.load_checkpoint(Path(folder) / "epoch-0001.pt") + 1
    numbers: list[Any] = []
    for epoch in range(begin, 4):
        loss = trainer.train_epoch(epoch)
        numbers.append((epoch, loss, trainer.validate(), trainer.scheduler.get_last_lr()))
        if not resume:
            trainer.save_checkpoint(epoch)
    trainer.close()
    # What validation used is the same on every rank.
    running = model.state_dict()["0.running_mean"].tolist()
    return numbers, weights(trainer.model) + running, trainer._update.state()
