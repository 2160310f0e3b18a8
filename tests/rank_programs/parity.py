"""A small language model trained on ranks, to be compared with the same in one plain process."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.choose import build_strategy
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.world import World, sum_over_ranks

WORDS, WIDTH, LENGTH = 13, 8, 6
STEPS = 3
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train: how it is spread, cut into micro-batches, counted and clipped."""

    strategy: str  # a key of SHARDINGS
    rounds: int
    counts: (
        str  # "equal" or "variable" tokens, or "samples": a mean over samples, of unequal numbers
    )
    clip_norm: float | None
    micro_batch_size: int = 2


SHARDINGS: dict[str, Sharding | None] = {
    "ddp": None,
    "fsdp": Sharding(),
    "shard_grad_op": Sharding(kind="shard_grad_op"),
    "offload": Sharding(cpu_offload=True),
    "hybrid of 1": Sharding(kind="hybrid_shard", shard_size=1),
    "hybrid of 2": Sharding(kind="hybrid_shard", shard_size=2),
    "hybrid": Sharding(kind="hybrid_shard"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        mixed: torch.Tensor = self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        return x + mixed


class Language(nn.Module):
    """Blocks, a norm, and an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def language_model(seed: int) -> Language:
    torch.manual_seed(seed)
    return Language()


def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One number for each token; 0 for those that do not count."""
    words, labels = batch
    logits = model(words)
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    ).view_as(labels)


def global_batch(case: Case, ranks: int, number: int) -> list[Batch]:
    """The micro-batches of one step, of all rounds and ranks: round by round, rank by rank."""
    places = range(case.rounds * ranks)
    sizes = [case.micro_batch_size for _ in places]
    if case.counts == "samples":
        sizes = [(3, 1, 2, 2)[(place + number) % 4] for place in places]
        if ranks > 1:
            sizes[-1] = 0  # the tail is used up: the last rank only takes part
    made = torch.Generator().manual_seed(number)
    words, labels = torch.randint(WORDS, (2, sum(sizes), LENGTH), generator=made)
    batches = list(zip(words.split(sizes), labels.split(sizes), strict=True))
    if case.counts == "variable":
        for place, (_, own) in enumerate(batches):
            share = 0.0 if place == 1 else (0.4, 0.9, 0.15)[place % 3]
            own[torch.rand(own.shape, generator=made) >= share] = -100
    return batches


def _step(case: Case, world: World, number: int) -> Step:
    batches = global_batch(case, world.world_size, number)
    own = batches[world.global_rank :: world.world_size]
    samples = sum(len(words) for words, _ in batches)
    return Step(
        epoch=0,
        number=number,
        rounds=case.rounds,
        samples=samples,
        nominal_samples=samples,
        micro_batches=[MicroBatch(batch=_or_any(one), samples=len(one[0])) for one in own],
    )


def _or_any(batch: Batch) -> Batch:
    """An idle rank computes something, whatever it is."""
    return batch if len(batch[0]) else (torch.ones(1, LENGTH).long(), torch.ones(1, LENGTH).long())


def train(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    return [_train(world, case, STEPS) for case in cases]


def first_gradient(world: World, case: Case) -> list[float]:
    gradient: list[float] = _train(world, case, 1).get("gradient", [])
    return gradient


def _train(world: World, case: Case, steps: int) -> dict[str, Any]:
    sharding = SHARDINGS[case.strategy]
    strategy = build_strategy("ddp" if sharding is None else "fsdp", world, sharding=sharding)
    model = strategy.prepare(language_model(100 + world.global_rank))  # rank 0's values count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    update = TrainStep(model, optimizer, strategy, world, clip_norm=case.clip_norm)
    gradient: list[float] = []
    losses = []
    for number in range(steps):
        if number == steps - 1:  # as it is applied
            optimizer.register_step_pre_hook(
                lambda *_: gradient.extend(_flat([one.grad for one in model.parameters()]))
            )
        sums = [0.0, 0.0]
        for micro in update.accumulate(_step(case, world, number)):
            each = token_losses(model, micro.batch)
            count = micro.samples
            if case.counts == "samples":
                loss = each.mean()
                update.backward(loss)
                total = loss.item() * count
            else:
                count = int((micro.batch[1] != -100).sum())
                update.backward(each.sum(), count)
                total = each.sum().item()
            sums = [sums[0] + total, sums[1] + count]
        assert update.apply().applied
        total, counted = sum_over_ranks(sums, world)
        losses.append(total / counted)
    weights = _flat(list(model.parameters()))
    answer: dict[str, Any] = {
        "checksum": zlib.crc32(repr(weights).encode()),
        "tied": model_is_tied(model),
    }
    if world.is_first:
        answer |= {"losses": losses, "gradient": gradient, "weights": weights}
    return answer


def model_is_tied(model: nn.Module) -> bool:
    language: Any = getattr(model, "module", model)
    return language.head.weight is language.embedding.weight


def _flat(tensors: list[Any]) -> list[float]:
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return torch.cat([one.detach().flatten() for one in whole]).tolist()
