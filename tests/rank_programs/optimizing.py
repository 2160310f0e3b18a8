"""Trainings with each optimizer, and with an evaluation metric that decides which checkpoint is the best."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rank_programs.resuming import StopAt
from torchmuster.checkpoints.manifest import best_manifest, committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.train import optimizers
from torchmuster.train.checkpointing.saves import CheckpointSettings
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.optimizers import Name, optimizer_named, schedule
from torchmuster.train.precision import FP32
from torchmuster.train.reports import Reports
from torchmuster.train.seeds import seed_everything
from torchmuster.train.stop_request import StoppedAtRequest
from torchmuster.train.strategies import choose
from torchmuster.train.strategies.choose import build_strategy
from torchmuster.train.trainer import Evaluation, Trainer
from torchmuster.train.world import World

WORDS, WIDTH, SAMPLES, STEPS = 40, 16, 24, 6
RATE, DECAY = 1e-2, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.back(torch.tanh(self.wide(self.norm(x))))
        return output


class Language(nn.Module):
    """An embedding, blocks and a head: all kinds of parameters that optimizers treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits.clone()


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(2)
    words = torch.randint(WORDS, (SAMPLES, 5), generator=made)
    return [(one, (one * 3 + 1) % WORDS) for one in words]


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    words, labels = batch
    return functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())


def make(
    world: World,
    folder: Path,
    name: Name,
    strategy: choose.Name,
    *,
    evaluation: Evaluation | None = None,
    micro_batch_size: int = 2,
    **saving: Any,
) -> Trainer:
    """Make what a new process would make."""
    seed_everything(3, world)
    return Trainer(
        world=world,
        model=Language,
        loss=entropy,
        optimizer=optimizer_named(name, learning_rate=RATE, weight_decay=DECAY),
        parameter_groups=lambda model: optimizers.parameter_groups(
            model, learning_rate=RATE, weight_decay=DECAY
        ),
        data=BatchLoader(
            samples(), world, global_batch_size=8, micro_batch_size=micro_batch_size, seed=3
        ),
        strategy=build_strategy(strategy, world, precision=FP32),
        precision=FP32,
        clip_norm=1.0,
        schedule=lambda optimizer: schedule(optimizer, "cosine", warmup_steps=2, total_steps=STEPS),
        evaluation=evaluation,
        checkpoints=CheckpointSettings(to=folder, **saving),
        reports=Reports(world, quiet=True),
        seed=1,
    )


def weights(trainer: Trainer) -> dict[str, list[float]]:
    state = trainer.strategy.value.state_dict(trainer.model)["model"]
    whole = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in state.items()
    }
    return {name: one.flatten().tolist() for name, one in whole.items()}


def straight_and_resumed(
    world: World, folder: Path, name: Name, strategy: choose.Name
) -> list[dict[str, list[float]]]:
    """Return the weights of an uninterrupted training, and of one by three trainers."""
    found = []
    for title, parts in {"straight": (STEPS,), "parts": (1, 4, STEPS)}.items():
        for steps in parts:
            trainer = make(world, folder / title, name, strategy)
            trainer.resume()
            trainer.fit(steps=steps)
            dist.barrier()
        found.append(weights(trainer))
    return found


def one_training(
    world: World, folder: Path, name: Name, strategy: choose.Name, micro_batch_size: int
) -> dict[str, list[float]]:
    trainer = make(world, folder, name, strategy, micro_batch_size=micro_batch_size)
    trainer.fit(steps=STEPS)
    return weights(trainer)


def evaluated(
    world: World,
    folder: Path,
    losses: Mapping[int, float],
    stops: tuple[int, ...],
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Train with these evaluation losses by step, stopped and resumed at ``stops``."""
    for stop in (*stops, None):
        trainers: list[Trainer] = []

        def measure(model: nn.Module, batch: Any, trainers: Any = trainers) -> dict[str, Any]:
            return {"loss": (losses[trainers[0].step], 1)}

        trainer = make(
            world,
            folder,
            "adamw",
            "ddp",
            evaluation=Evaluation(
                loader=BatchLoader(samples()[:4], world, global_batch_size=4),
                measure=measure,
                **how,
            ),
            stop=StopAt(stop),
            keep=1,
            keep_best=True,
            every=2,
        )
        trainers.append(trainer)
        trainer.resume()
        with contextlib.suppress(StoppedAtRequest):
            trainer.fit(steps=20)
        dist.barrier()
    manifests = committed_manifests(FolderStore(folder))
    best = best_manifest(manifests)
    return {
        "step": trainer.step,
        "kept": sorted(one.step for one in manifests),
        "best": None if best is None else (best.step, dict(best.best or {})),
        "weights": weights(trainer)["head.bias"],
    }
