"""Teach a small language model by PPO to put digits in order: each rank writes answers, all learn one model.

    python train_distributed_ppo.py
    torchrun --standalone --nproc-per-node 2 train_distributed_ppo.py --config config.yaml
    muster run --device cpu --ranks 2 train_distributed_ppo.py

A task is "3141=", and its right answer "1134". Nobody shows the model an answer: it writes one, a program
looks which digits are right, and that is its reward. So nothing is downloaded, and no reward can be argued with.

Of a settings file it reads experiment_name, distributed.strategy, distributed.num_gpus,
train.learning_rate, train.clip_norm and train.seed.
"""

import argparse
import math
import os
from pathlib import Path

import torch
from little_gpt import LittleGpt
from torch import nn
from torch.distributions import Categorical

from torchmuster import (
    DataLoaderAdapter,
    TrainStep,
    World,
    build_strategy,
    join_world,
    seed_everything,
    sum_over_ranks,
)
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings

DIGITS, EQUALS = 4, 10  # digits of a task; the signs are 0 to 9 and "="
ANSWERS = 512  # of all ranks together, between two updates
PASSES, PARTS = 2, 4  # over the answers, and batches in each
TRACE, CLIP = 0.95, 0.2

Answered = tuple[torch.Tensor, ...]  # texts, chances of their signs, gains, returns


class Writer(LittleGpt):
    """Says how likely each sign is as the next, and how much reward is still to come."""

    def __init__(self) -> None:
        super().__init__(length=2 * DIGITS, signs=11, width=64, layers=2)
        self.reward_to_come = nn.Linear(64, 1)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return the logits of the next sign at each place, and the value of each place."""
        read = self.read(text)
        return self.last(read), self.reward_to_come(read).squeeze(-1)


def rewards_of(texts: torch.Tensor) -> torch.Tensor:
    """Check the answers: each digit in its right place is worth its part of 1."""
    right = texts[:, :DIGITS].sort(dim=1).values
    return (texts[:, DIGITS + 1 :] == right).float() / DIGITS


@torch.no_grad()
def answer(model: nn.Module, tasks: int, world: World) -> tuple[Answered, float]:
    """Draw tasks and let the model answer; return what there is to learn, and the mean reward of all ranks."""
    digits = torch.randint(10, (tasks, DIGITS), device=world.device)
    texts = torch.cat([digits, torch.full_like(digits[:, :1], EQUALS)], dim=1)
    chances, values = [], []
    for _ in range(DIGITS):
        logits, value = model(texts)
        signs = Categorical(logits=logits[:, -1])
        sign = signs.sample()
        texts = torch.cat([texts, sign[:, None]], dim=1)
        chances.append(signs.log_prob(sign))
        values.append(value[:, -1])
    rewards = rewards_of(texts)
    gains = torch.zeros_like(rewards)
    gain = later = torch.zeros(tasks, device=world.device)
    for place in reversed(range(DIGITS)):  # how much better it went than was expected (GAE)
        gain = rewards[:, place] + later - values[place] + TRACE * gain
        gains[:, place], later = gain, values[place]
    sums = [gains.sum(), gains.square().sum(), gains.numel(), rewards.sum(), tasks]
    total, squares, count, reward, answers = sum_over_ranks([float(one) for one in sums], world)
    mean = total / count  # over the gains of all ranks, so that the number of ranks changes nothing
    normal = (gains - mean) / math.sqrt(squares / count - mean**2 + 1e-8)
    returns = gains + torch.stack(values, dim=1)
    return (texts, torch.stack(chances, dim=1), normal, returns), reward / answers


def loss_of(model: nn.Module, batch: Answered) -> torch.Tensor:
    """Return PPO's loss: better signs more often, but never far from how the answers were written."""
    texts, chances, gains, returns = batch
    logits, values = model(texts[:, :-1])
    signs = Categorical(logits=logits[:, DIGITS:])
    ratio = (signs.log_prob(texts[:, DIGITS + 1 :]) - chances).exp()
    better = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains)
    wrong = (values[:, DIGITS:] - returns).square()
    loss: torch.Tensor = (-better + 0.5 * wrong - 0.01 * signs.entropy()).mean()
    return loss


def train(world: World, settings: Settings, updates: int) -> None:
    """Answer and learn in turn."""
    torch.manual_seed(settings.train.seed)  # the first weights: the strategy takes rank 0's
    name = settings.distributed.strategy
    strategy = build_strategy("ddp" if name == "auto" else name, world)
    model = strategy.prepare(Writer())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.train.learning_rate)
    update = TrainStep(model, optimizer, strategy, world, clip_norm=settings.train.clip_norm)
    seed_everything(settings.train.seed, world)  # from here on each rank draws other tasks
    tasks = ANSWERS // world.world_size
    for number in range(updates):
        answered, reward = answer(model, tasks, world)
        if world.is_first and number % 10 == 0:
            print(f"{settings.experiment_name}, update {number}: reward {reward:.3f}", flush=True)
        for _ in range(PASSES):
            order = torch.randperm(tasks, device=world.device)
            batches = [tuple(one[chosen] for one in answered) for chosen in order.chunk(PARTS)]
            for step in DataLoaderAdapter(batches, world).epoch(number):
                for micro in update.accumulate(step):
                    update.backward(loss_of(model, micro.batch))
                update.apply()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="a settings file")
    parser.add_argument("--updates", type=int, default=31)
    options = parser.parse_args()
    settings = resolve_settings(file=options.config, environment=os.environ).settings
    with join_world() as world:
        asked = settings.distributed.num_gpus
        if world.is_first and asked not in (None, world.world_size):
            print(
                f"num_gpus is {asked}, but the ranks are {world.world_size}: start {asked} of them"
            )
        train(world, settings, options.updates)
