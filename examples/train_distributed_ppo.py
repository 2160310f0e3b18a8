"""Train a policy by PPO to balance poles: every rank plays games of its own, all learn one policy.

    python train_distributed_ppo.py
    torchrun --standalone --nproc-per-node 2 train_distributed_ppo.py --config config.yaml
    muster run --device cpu --ranks 2 train_distributed_ppo.py

Of a settings file it reads experiment_name, distributed.strategy, distributed.num_gpus,
train.learning_rate, train.clip_norm and train.seed.
"""

import argparse
import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

from torchmuster.config.resolve import resolve
from torchmuster.config.settings import Settings
from torchmuster.train.agreement import totals
from torchmuster.train.data.foreign import ForeignLoader
from torchmuster.train.seeds import seed_everything
from torchmuster.train.strategies.choose import build
from torchmuster.train.update import Update
from torchmuster.train.world import World, join_world

GAMES, MOVES = 32, 64  # games of all ranks together, and moves between two updates
PASSES, PARTS = 4, 4  # over what was played, and batches in each
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2


class Poles:
    """Many poles on carts at once; a push to the left or right each move, 1 point while it stands."""

    def __init__(self, games: int, device: torch.device) -> None:
        self.state = torch.empty(games, 4, device=device).uniform_(-0.05, 0.05)
        self.moves = torch.zeros(games, device=device)

    def push(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move all carts; return which games ended now, and how long those were."""
        x, v, angle, spin = self.state.unbind(1)
        push = (actions * 20.0 - 10.0 + 0.05 * spin**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - angle.cos() ** 2 / 11))
        speed_up = push - 0.05 * turn * angle.cos() / 1.1
        self.state = torch.stack(
            [x + 0.02 * v, v + 0.02 * speed_up, angle + 0.02 * spin, spin + 0.02 * turn], dim=1
        )
        self.moves += 1
        fallen = (self.state[:, 2].abs() > math.pi / 15) | (self.state[:, 0].abs() > 2.4)
        ended = fallen | (self.moves >= 500)
        lengths = self.moves[ended]
        fresh = torch.empty_like(self.state).uniform_(-0.05, 0.05)
        self.state = torch.where(ended[:, None], fresh, self.state)
        self.moves = torch.where(ended, 0.0, self.moves)
        return ended, lengths


class Policy(nn.Module):
    """Says how good each action is, and how many points are still to come."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the actions, and the value of each state."""
        return self.act(state), self.value(state).sum(-1)


@torch.no_grad()
def play(model: nn.Module, poles: Poles, world: World) -> tuple[tuple[torch.Tensor, ...], float]:
    """Play on; return what was seen, done and gained, and how long the games were that ended."""
    seen, lengths = [], [torch.zeros(0, device=world.device)]
    for _ in range(MOVES):
        state = poles.state
        logits, value = model(state)
        actions = Categorical(logits=logits)
        action = actions.sample()
        ended, length = poles.push(action)
        lengths.append(length)
        seen.append((state, action, actions.log_prob(action), value, ended))
    states, acts, chances, values, ends = (torch.stack(one) for one in zip(*seen, strict=True))
    gains, gain, later = torch.zeros_like(values), 0.0, model(poles.state)[1]
    for move in reversed(range(MOVES)):
        goes_on = 1.0 - ends[move].float()
        gain = 1.0 + DISCOUNT * goes_on * (later + TRACE * gain) - values[move]
        gains[move], later = gain, values[move]
    done = torch.cat(lengths)
    sums = [gains.sum(), gains.square().sum(), gains.numel(), done.sum(), done.numel()]
    total, squares, count, moves, games = totals([float(one) for one in sums], world)
    mean = total / count  # over the gains of all ranks, so that the number of ranks changes nothing
    normal = (gains - mean) / math.sqrt(squares / count - mean**2 + 1e-8)
    flat = (one.flatten(0, 1) for one in (states, acts, chances, normal, gains + values))
    return tuple(flat), moves / max(games, 1.0)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return PPO's loss: better actions more often, but never far from those that were played."""
    states, acts, chances, gains, returns = batch
    logits, values = model(states)
    actions = Categorical(logits=logits)
    ratio = (actions.log_prob(acts) - chances).exp()
    better = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains)
    wrong = (values - returns).square()
    loss: torch.Tensor = (-better + 0.01 * wrong - 0.01 * actions.entropy()).mean()
    return loss


def train(world: World, settings: Settings, updates: int) -> None:
    """Play and learn in turn."""
    torch.manual_seed(settings.train.seed)  # the first weights: DDP takes rank 0's
    name = settings.distributed.strategy
    strategy = build("ddp" if name == "auto" else name, world)
    model = strategy.prepare(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.train.learning_rate)
    update = Update(model, optimizer, strategy, world, clip_norm=settings.train.clip_norm)
    seed_everything(settings.train.seed, world)  # from here on each rank plays other games
    games = GAMES // world.world_size
    poles = Poles(games, world.device)
    for number in range(updates):
        played, length = play(model, poles, world)
        if world.is_first and number % 5 == 0:
            said = f"update {number}: games of {length:.1f} moves"
            print(f"{settings.experiment_name}, {said}", flush=True)
        for _ in range(PASSES):
            order = torch.randperm(games * MOVES, device=world.device)
            batches = [tuple(one[chosen] for one in played) for chosen in order.chunk(PARTS)]
            for step in ForeignLoader(batches, world).epoch(number):
                for micro in update.accumulate(step):
                    update.backward(loss_of(model, micro.batch))
                update.apply()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="a settings file")
    parser.add_argument("--updates", type=int, default=31)
    options = parser.parse_args()
    settings = resolve(file=options.config, environment=os.environ).settings
    with join_world() as world:
        asked = settings.distributed.num_gpus
        if world.is_first and asked not in (None, world.world_size):
            print(
                f"num_gpus is {asked}, but the ranks are {world.world_size}: start {asked} of them"
            )
        train(world, settings, options.updates)
