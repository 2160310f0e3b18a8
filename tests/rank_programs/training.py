"""Trainings on real ranks, and the same by hand in one process."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchmuster.errors import MusterError
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.reports import Reports
from torchmuster.train.step_line import StepRecord
from torchmuster.train.strategies.choose import Name, build_strategy
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.trainer import Trainer
from torchmuster.train.weights import save_weights
from torchmuster.train.world import World

SAMPLES, GLOBAL_BATCH = 22, 8  # the last step of an epoch has 6 samples
IGNORED = -100


class Tagger(nn.Module):
    """Gives each place of a sequence a class; embedding and output are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        output: torch.Tensor = self.head(hidden)
        return output


def tagger() -> nn.Module:
    torch.manual_seed(3)
    return Tagger()


def sentences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return sequences of which unequal parts count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (SAMPLES, 5), generator=generator)
    labels = (tokens + 1) % 7
    for sample in range(SAMPLES):
        labels[sample, 1 + sample % 5 :] = IGNORED
    return list(zip(tokens, labels, strict=True))


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, labels = batch
    return functional.cross_entropy(model(tokens)[:, 0], labels[:, 0])


def counted_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = batch
    total = functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


LOSSES: dict[str, Any] = {"mean": mean_loss, "counted": counted_loss}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def make(
    world: World, strategy: Strategy, kind: str, records: list[StepRecord], **how: Any
) -> Trainer:
    return Trainer(
        world=world,
        model=how.pop("model", None) or tagger(),
        loss=LOSSES[kind],
        optimizer=how.pop("optimizer", sgd),
        data=how.pop("loader", None)
        or BatchLoader(
            sentences(),
            world,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=-(-GLOBAL_BATCH // (2 * world.world_size)),
        ),
        strategy=strategy,
        clip_norm=0.5,
        reports=Reports(
            world,
            quiet=True,
            log_every=2,
            folder=how.pop("folder", None),
            on_record=[records.append],
        ),
        **how,
    )


def by_hand(world: World, kind: str, epochs: int) -> list[tuple[float, int]]:
    """Train on whole batches with plain torch; return each step's loss and how many it is over."""
    model = tagger()
    optimizer = sgd(list(model.parameters()))
    loader = BatchLoader(sentences(), world, global_batch_size=GLOBAL_BATCH)
    losses = []
    for epoch in range(epochs):
        for step in loader.epoch(epoch):
            (micro,) = step
            optimizer.zero_grad()
            result = LOSSES[kind](model, micro.batch)
            total, count = result if kind == "counted" else (result * micro.samples, micro.samples)
            (total / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append((total.item(), int(count)))
    return losses


def train_in_many_ways(world: World, folder: Path) -> dict[str, Any]:
    """Train with each strategy and kind of loss; return what rank 0's records say."""
    answers: dict[str, Any] = {}
    names: tuple[Name, ...] = ("single", "ddp", "fsdp")
    for name in names if world.world_size == 1 else names[1:]:
        for kind in LOSSES:
            records: list[StepRecord] = []
            its_folder = folder / f"{name}-{kind}-{world.world_size}"
            trainer = make(
                world,
                build_strategy(name, world),
                kind,
                records,
                folder=its_folder,
            )
            trainer.fit(epochs=2)
            answers[f"{name} {kind}"] = [asdict(one) for one in records]
    return answers


def train_by_hand(world: World) -> dict[str, list[tuple[float, int]]]:
    return {kind: by_hand(world, kind, 2) for kind in LOSSES}


class Slow:
    """A dataset that is slow on one rank."""

    def __init__(self, delay_s: float) -> None:
        self._samples = sentences()
        self._delay_s = delay_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._delay_s)
        return self._samples[index]


def verdicts(world: World) -> dict[str, list[str]]:
    """Train with slow reading on all ranks, on rank 1 alone, and with slow computing on rank 1."""

    def train(delay_s: float, compute_s: float) -> list[str]:
        records: list[StepRecord] = []
        loader = BatchLoader(Slow(delay_s), world, global_batch_size=GLOBAL_BATCH)
        trainer = make(world, build_strategy("ddp", world), "mean", records, loader=loader)

        def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(compute_s)
            return mean_loss(model, batch)

        trainer.loss = slow_loss
        trainer.fit(steps=20)
        return [one.verdict for one in records]

    # Long beside what a busy machine lets a rank wait for its turn.
    late = 0.06 if world.global_rank == 1 else 0.0
    return {
        "all wait for data": train(0.03, 0.0),
        "rank 1 waits for data": train(late, 0.0),
        "rank 1 computes slowly": train(0.0, 5 * late),
    }


def communication(world: World) -> dict[str, float | None]:
    """Return the last record's share of communication under each strategy."""
    names: tuple[Name, ...] = ("ddp", "fsdp")
    shares = {}
    for name in names:
        records: list[StepRecord] = []
        make(world, build_strategy(name, world), "mean", records).fit(steps=6)
        shares[name] = records[-1].communication_share if records else None
    return shares


def go_on_elsewhere(world: World, name: Name) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train 5 steps, and 5 more; then the last 5 again in a new trainer that was given the state."""
    records: list[StepRecord] = []
    trainer = make(world, build_strategy(name, world), "mean", records)
    trainer.fit(steps=5)
    state = {
        part: {key: _copy(value) for key, value in states.items()}
        for part, states in trainer.state().items()
    }
    records.clear()
    trainer.fit(steps=10)
    again: list[StepRecord] = []
    other = make(world, build_strategy(name, world), "mean", again)
    other.restore(state)
    other.fit(steps=10)
    return [_plain(one) for one in records], [_plain(one) for one in again]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value


def _plain(record: StepRecord) -> dict[str, Any]:
    return {"step": record.step, "epoch": record.epoch, "loss": record.loss}


class Poisoned:
    """A dataset of numbers; one sample is not a number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float("nan") if index == 6 else float(index))


def with_a_bad_sample(world: World) -> tuple[list[str], list[dict[str, Any]], int]:
    """Train on data with NaN; return what was said, and the records."""
    said: list[str] = []
    records: list[StepRecord] = []
    loader = BatchLoader(Poisoned(), world, global_batch_size=4, shuffle=False)
    trainer = Trainer(
        world=world,
        model=nn.Linear(3, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        data=loader,
        reports=Reports(world, quiet=True, log_every=4, on_record=[records.append]),
    )
    trainer.reports.say = said.append  # type: ignore[method-assign, assignment]
    trainer.fit(epochs=1)
    return said, [asdict(one) for one in records], trainer.step


def save(world: World, folder: Path) -> dict[str, Any]:
    """Save under each strategy, in one file and in several; return the error of what cannot be."""
    answers: dict[str, Any] = {}
    names: tuple[Name, ...] = ("ddp", "fsdp")
    for name in names:
        strategy = build_strategy(name, world)
        model = strategy.prepare(tagger())
        for limit in (10**9, 300):
            save_weights(
                model, strategy, folder / f"{name}-{limit}", world, most_in_a_file_bytes=limit
            )
        save_weights(model, strategy, folder / f"{name}-{10**9}", world)  # in the place of the old
        try:
            save_weights(model, strategy, folder / "file" / "below", world)
        except MusterError as error:
            answers[name] = str(error)
    return answers


def with_an_optimizer(world: World, name: Name) -> list[float]:
    """Train with an optimizer that was made before the strategy; return the norm of each parameter."""
    torch.manual_seed(0)
    model = tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = make(world, build_strategy(name, world), "mean", [], model=model, optimizer=optimizer)
    trainer.fit(steps=3)
    parameters = trainer.strategy.value.state_dict(trainer.model)["model"].values()
    return [float(getattr(one, "full_tensor", lambda one=one: one)().norm()) for one in parameters]
