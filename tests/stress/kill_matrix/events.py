"""Kills as data: who is killed, and at which moment of a training."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

VICTIMS = ("rank 0", "another rank", "store", "node agent", "launcher", "whole node")
MOMENTS = ("forward", "collective", "save", "commit", "committed", "restart", "any time", "end")
EVENTS_OF_A_RUN = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training is spread."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks} ranks"


LAYOUTS = tuple(
    Layout(strategy=strategy, ranks=ranks) for ranks in (2, 4) for strategy in ("ddp", "fsdp")
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill -9. ``restart`` is before the ranks have begun to train (again), ``end`` after the last step."""

    victim: str
    moment: str

    def __str__(self) -> str:
        return f"{self.victim} at {self.moment}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, and what strikes it, in this order; ``seed`` draws the rest (which rank, how long after)."""

    number: int
    layout: Layout
    kills: tuple[Kill, ...]
    seed: str

    def __str__(self) -> str:
        kills = ", ".join(map(str, self.kills))
        return f"run {self.number} ({self.layout}, seed {self.seed}): {kills}"


def plans(events: int, seed: int, *, of_a_run: int = EVENTS_OF_A_RUN) -> Iterator[Plan]:
    """Yield runs with so many events in all: in turns over the layouts, and in each all kinds in turn.

    The last kill of a run is at its end.
    """
    chance = random.Random(seed)
    kinds = [_kinds(chance) for _ in LAYOUTS]
    last_ones = _victims(chance)
    for number in itertools.count(1):
        if not events:
            return
        place = (number - 1) % len(LAYOUTS)
        count = min(events, of_a_run)
        events -= count
        yield Plan(
            number=number,
            layout=LAYOUTS[place],
            kills=(
                *itertools.islice(kinds[place], count - 1),
                Kill(victim=next(last_ones), moment="end"),
            ),
            seed=f"{seed}.{number}",
        )


def _kinds(chance: random.Random) -> Iterator[Kill]:
    """Yield every victim at every moment but the end, in some order, before one comes again."""
    while True:
        pairs = list(itertools.product(VICTIMS, MOMENTS[:-1]))
        chance.shuffle(pairs)
        for victim, moment in pairs:
            yield Kill(victim=victim, moment=moment)


def _victims(chance: random.Random) -> Iterator[str]:
    while True:
        yield from chance.sample(VICTIMS, len(VICTIMS))
