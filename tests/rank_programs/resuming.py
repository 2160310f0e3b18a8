"""Trainings that are interrupted and gone on with, and the same without an interruption."""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.train.checkpointing.saves import CheckpointSettings
from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.optimizers import schedule
from torchmuster.train.precision import FP16, FP32
from torchmuster.train.progress import progress
from torchmuster.train.reports import Reports
from torchmuster.train.seeds import seed_everything
from torchmuster.train.stop_request import StoppedAtRequest
from torchmuster.train.strategies.choose import Name, build_strategy
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.trainer import Evaluation, Trainer
from torchmuster.train.world import World
from torchmuster.worker.training import train_from_settings

WIDTH, SAMPLES, STEPS = 256, 40, 11  # with batches of 16 an epoch has 3 steps


class OutOfOrder(nn.Module):
    """Uses its layers in another order than it has them, over more than one of DDP's buckets.

    ``plain`` leaves out what depends on how samples are divided among the ranks.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self._dropout = 0.0 if plain else 0.2
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        norms = [nn.Identity() if plain else nn.BatchNorm1d(WIDTH) for _ in range(3)]
        self.norms = nn.Sequential(*norms)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norms(inputs)
        for place in (4, 0, 3, 5, 1, 2):
            hidden = hidden + torch.tanh(
                self.layers[place](functional.dropout(hidden, self._dropout))
            )
        output: torch.Tensor = self.head(hidden)
        return output


class Transformed:
    """Samples to which noise of three kinds is added when they are read; what was read is noted."""

    def __init__(self, noise: float = 0.1) -> None:
        self.read: list[int] = []
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        drawn = random.random() + float(np.random.rand()) + torch.rand(())
        return self._inputs[index] + self._noise * drawn, index % 3


class Killed(Exception):
    """Stands for the end of a process."""


class StopAt:
    """A request to end that comes at a step, in the place of one that comes by a signal."""

    origin = "SIGUSR1 to rank 1"

    def __init__(self, step: int | None) -> None:
        self._step = step

    def due(self, step: int) -> bool:
        return step == self._step


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    inputs, labels = batch
    return {"accuracy": model(inputs).argmax(-1) == labels}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def make(
    world: World,
    name: Name,
    folder: Path,
    *,
    every: int | None = 3,
    stop_at: int | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] = entropy,
    log_every: int = 1,
    fp16: bool = False,
    plain: bool = False,
    data: Transformed | None = None,
) -> Trainer:
    """Make what a new process would make; nothing of the last one may matter."""
    seed_everything(3, world)
    precision = FP16 if fp16 else FP32
    data = data or Transformed(0.0 if plain else 0.1)
    loader = BatchLoader(data, world, global_batch_size=16, micro_batch_size=2, seed=3)
    return Trainer(
        world=world,
        model=lambda: OutOfOrder(plain),
        seed=1,
        loss=loss,
        optimizer=momentum if plain else adamw,
        data=loader,
        strategy=build_strategy(name, world, precision=precision),
        precision=precision,
        clip_norm=0.5,
        schedule=lambda optimizer: schedule(optimizer, "cosine", warmup_steps=4, total_steps=STEPS),
        evaluation=Evaluation(
            loader=BatchLoader(Transformed(0.0), world, global_batch_size=8), measure=accuracy
        ),
        checkpoints=CheckpointSettings(
            to=folder / "checkpoints",
            every=every,
            stop=StopAt(stop_at),  # type: ignore[arg-type]
        ),
        reports=Reports(world, folder=folder, quiet=True, log_every=log_every),
    )


def killed_at(step: int, trainer: Trainer) -> None:
    """Let a trainer's process end in the middle of a step."""
    whole = trainer.loss

    def loss(model: nn.Module, batch: Any) -> Any:
        if trainer.step == step and model.training:
            raise Killed
        return whole(model, batch)

    trainer.loss = loss


def with_interruptions(
    world: World,
    name: Name,
    folder: Path,
    *,
    kills: Sequence[int] = (),
    stops: Sequence[int] = (),
    **how: Any,
) -> dict[str, Any]:
    """Train to the end, with new trainers after each kill and stop; return what came out."""
    for step in kills:
        trainer = make(world, name, folder, **how)
        trainer.resume()
        killed_at(step, trainer)
        with pytest.raises(Killed):
            trainer.fit(steps=STEPS)
        dist.barrier()
    for step in stops:
        trainer = make(world, name, folder, stop_at=step, **how)
        trainer.resume()
        with pytest.raises(StoppedAtRequest) as stopped:
            trainer.fit(steps=STEPS)
        assert (stopped.value.code, stopped.value.step) == (75, step)
    trainer = make(world, name, folder, **how)
    loaded = trainer.resume()
    trainer.fit(steps=STEPS)
    dist.barrier()  # rank 0 has written the files
    return {
        "from": None if loaded is None else loaded.step,
        "steps": _lines(folder / "metrics" / "steps.jsonl"),
        "evaluations": _lines(folder / "metrics" / "evaluations.jsonl"),
        "weights": _digest(trainer),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return what a file says, without what the clock decides."""
    chosen = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "samples", "accuracy")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: line[key] for key in chosen if key in line} for line in lines]


def _digest(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    state = trainer.strategy.value.state_dict(trainer.model)["model"]
    for name in sorted(state):
        value = state[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def exactly(world: World, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Train in several ways, straight on and interrupted."""
    ways: dict[str, tuple[Name, dict[str, Any], dict[str, Any]]] = {
        # Saved after steps 3, 6 and 9: at the edge of each epoch.
        "ddp": ("ddp", {}, {"kills": (1, 5), "stops": (10,)}),
        "fsdp": ("fsdp", {}, {"kills": (5,), "stops": (7,)}),
        "fp16": ("ddp", {"fp16": True}, {"stops": (5,)}),
    }
    return {
        title: {
            "straight on": with_interruptions(world, name, folder / title / "a", **how),
            "interrupted": with_interruptions(world, name, folder / title / "b", **how, **when),
        }
        for title, (name, how, when) in ways.items()
    }


def part_of_a_run(
    world: World, name: Name, folder: Path, until: int
) -> tuple[list[int], list[dict[str, Any]], str]:
    """Go on with a run until a step, on whatever ranks; return what was read, the lines and what was said."""
    data = Transformed(0.0)
    said: list[str] = []
    trainer = make(world, name, folder, every=4, plain=True, data=data, stop_at=until)
    trainer.reports.say = said.append  # type: ignore[method-assign, assignment]
    trainer.resume()
    begun_at = trainer.step
    with contextlib.suppress(StoppedAtRequest):
        trainer.fit(steps=STEPS)
    dist.barrier()
    lines = _lines(folder / "metrics" / "steps.jsonl")
    return data.read, lines[begun_at:], said[0] if said else ""


def from_settings(world: World, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train from settings in one go, and in two; return the lines of both."""
    os.chdir(folder)
    lines = {}
    for title, parts in {"whole": [{"steps": 6}], "parts": [{"steps": 4}, {"steps": 6}]}.items():
        for part in parts:
            given = {"model.build": "own:model", "data.dataset": "own:data", "train.log_every": 1}
            given |= {f"train.{name}": value for name, value in part.items()}
            flags = [Flag(flag="", path=path, text=str(text)) for path, text in given.items()]
            train_from_settings(resolve_settings(flags=flags).settings, world, folder / title)
            dist.barrier()
        lines[title] = _lines(folder / title / "metrics" / "steps.jsonl")
    return lines


class Odd(nn.Module):
    """Has what is easily lost: no update at first, parameters used late, a teacher, a mean of its own."""

    mean: torch.Tensor
    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.teacher = nn.Parameter(torch.zeros(50_000), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.forwards += 1
                self.mean.lerp_(inputs.mean(0), 0.1)
        hidden = functional.dropout(torch.tanh(self.first(inputs - self.mean)), 0.2)
        if self.forwards > 6:
            hidden = hidden + self.late(hidden)
        output: torch.Tensor = self.head(hidden) * (float("nan") if self.forwards < 3 else 1.0)
        return output


def oddly(world: World, folder: Path) -> dict[str, Any]:
    """Train an odd model straight on, and in parts; return what came out, and the teachers that were saved."""
    found: dict[str, Any] = {}
    names: tuple[Name, ...] = ("single",) if world.world_size == 1 else ("ddp", "fsdp")
    for name in names:
        for way, parts in {"straight on": (10,), "in parts": (1, 4, 6, 10)}.items():
            seen: list[list[int]] = []  # the samples of each step
            its_folder = folder / f"{name} {way}"
            for steps in parts:
                trainer = _odd(world, name, its_folder, seen, every=1 if len(parts) > 1 else None)
                trainer.resume()
                trainer.fit(steps=steps)
            dist.barrier()
            lines = _lines(its_folder / "metrics" / "steps.jsonl")
            found[f"{name} {way}"] = (_digest(trainer), seen, lines)
        found[f"{name} teachers"] = _teachers(its_folder / "checkpoints")
    return found


def _odd(
    world: World, name: Name, folder: Path, seen: list[list[int]], *, every: int | None
) -> Trainer:
    seed_everything(3, world)
    numbers = torch.arange(SAMPLES)
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
    if world.world_size == 1:  # a sampler that draws when an epoch begins
        dataset = TensorDataset(inputs, numbers % 3, numbers)
        loader: Any = DataLoaderAdapter(DataLoader(dataset, batch_size=8, shuffle=True), world)
    else:
        data = list(zip(inputs, numbers % 3, numbers, strict=True))
        loader = BatchLoader(data, world, global_batch_size=8, seed=3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if progress.phase == "forward":  # and not where a bad step is looked into
            seen.append(batch[2].tolist())
        if isinstance(model, FSDPModule):  # else what is changed may be a copy
            model.reshard()
        with torch.no_grad():
            next(one for name, one in model.named_parameters() if "teacher" in name).add_(1)
        return entropy(model, batch[:2])

    find = {"find_unused_parameters": True}
    return Trainer(
        world=world,
        model=Odd(),
        loss=loss,
        optimizer=adamw,
        data=loader,
        strategy=Ddp(world, **find) if name == "ddp" else build_strategy(name, world),
        checkpoints=CheckpointSettings(to=folder / "checkpoints", every=every, keep=20),
        reports=Reports(world, folder=folder, quiet=True, log_every=50),
    )


def _teachers(place: Path) -> list[tuple[int, set[float]]]:
    """Return each checkpoint's step, and the values that its frozen parameter has."""
    found = []
    for one in sorted(place.glob("step-*")):
        values: set[float] = set()
        for file in one.glob("*.safetensors"):
            for key, tensor in load_file(file).items():
                if key.startswith("model.teacher"):
                    values |= set(tensor.tolist())
        found.append((int(one.name.split("-")[1]), values))
    return found
