"""What more ranks bring: real steps on 1, 2, 4, … ranks of this machine, with and without each other's gradients.

Portions tell it all. One rank takes ``whole`` samples a step. With n ranks, *weak* scaling leaves each rank the whole, *strong*
scaling gives it whole / n. Each number of ranks is also timed with the portions of all larger numbers: what only
smaller portions cost is then known from fewer ranks, and a forecast can be made from them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.errors import Impossible
from torchmuster.plan.job import Work

PROGRAM = "torchmuster.bench.probes.scaling"
Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked: which training, on how many ranks, and how it is timed."""

    work: Work
    strategy: Literal["ddp", "fsdp"]
    precision: Literal["fp32", "bf16", "fp16"]
    ranks: tuple[int, ...]  # numbers of ranks, ascending, the first is 1
    whole: int  # samples of a step of one rank
    micro_batch_size: int | None  # at most so many samples at once; None: all of a portion
    workers: int  # that read for each rank
    device: Literal["cpu", "gpu"]
    threads: int | None  # of each rank, on the CPU
    slots: int | None  # ranks that have cores or a device to themselves; None: not known
    rounds: int
    passes: int  # over all numbers of ranks

    def portions(self, ranks: int) -> tuple[int, ...]:
        """Return the portions that so many ranks are timed with, largest first."""
        of_strong = (self.whole // number for number in self.ranks if number >= ranks)
        return tuple(sorted({self.whole, *of_strong}, reverse=True))

    def portion(self, ranks: int, mode: Mode) -> int:
        """Return the samples of each rank."""
        return self.whole if mode == "weak" else self.whole // ranks

    def crowding(self, ranks: int) -> float:
        """Return how many ranks share what one rank has to itself when it is alone; 1 where there is room."""
        return 1.0 if self.slots is None else max(1.0, ranks / self.slots)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What each rank is told."""

    study: Study
    portions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Times:
    """One rank's seconds for steps of one portion: a sample for each round."""

    step_s: tuple[float, ...]  # whole steps
    alone_s: tuple[
        float, ...
    ]  # the same without anything sent; all ranks at once; of one rank, its steps
    read_s: float  # of the latter, what reading the data took: the median


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank saw."""

    rank: int
    device: str
    backend: str
    sent_bytes: int  # gradients of a step
    shards: int  # parts of the model that fsdp gathers one by one; 0 under ddp
    by_portion: Mapping[int, Times]
    messages_s: Mapping[int, tuple[float, ...]] = field(
        default_factory=dict
    )  # all-reduces, by bytes


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What all ranks together took for steps of one portion, round by round."""

    step_s: tuple[float, ...]  # of the slowest rank, for which the others wait
    alone_s: tuple[float, ...]  # the mean of the ranks
    alone_slowest_s: tuple[float, ...]
    read_s: float  # the mean of the ranks


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """All that was measured with one number of ranks."""

    ranks: int
    sent_bytes: int
    shards: int
    backend: str
    by_portion: Mapping[int, Taken]
    messages_s: Mapping[int, tuple[float, ...]]  # all-reduces on the slowest rank, by bytes


def measure(study: Study, *, say: Callable[[str], None] = lambda _: None) -> dict[int, OnRanks]:
    """Time the study's steps with each number of ranks, in several passes; return all of it by number of ranks."""
    seen: dict[int, list[list[RankTimes]]] = {number: [] for number in study.ranks}
    for turn in range(study.passes):
        for number in study.ranks:
            words = f"{number} {'rank' if number == 1 else 'ranks'}"
            say(f"pass {turn + 1} of {study.passes}: steps on {words}")
            seen[number].append(
                run_probe(
                    PROGRAM,
                    Asked(study=study, portions=study.portions(number)),
                    RankTimes,
                    ranks=number,
                    device=study.device,
                    folder=study.work.folder,
                    environment={} if study.threads is None else _threads(study.threads),
                    doing="timing steps",
                    say=say,
                )
            )
    return {number: together(passes) for number, passes in seen.items()}


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def together(passes: Sequence[Sequence[RankTimes]]) -> OnRanks:
    """Put together what the ranks of one or several passes saw."""
    first = passes[0][0]
    return OnRanks(
        ranks=len(passes[0]),
        sent_bytes=first.sent_bytes,
        shards=first.shards,
        backend=first.backend,
        by_portion={
            portion: _taken([[one.by_portion[portion] for one in ranks] for ranks in passes])
            for portion in first.by_portion
        },
        messages_s={
            size: tuple(
                max(sample)
                for ranks in passes
                for sample in zip(*(one.messages_s[size] for one in ranks), strict=True)
            )
            for size in first.messages_s
        },
    )


def _taken(passes: Sequence[Sequence[Times]]) -> Taken:
    def rounds(
        of: Callable[[Times], tuple[float, ...]], join: Callable[[tuple[float, ...]], float]
    ) -> tuple[float, ...]:
        return tuple(
            join(sample)
            for ranks in passes
            for sample in zip(*(of(one) for one in ranks), strict=True)
        )

    return Taken(
        step_s=rounds(lambda one: one.step_s, max),
        alone_s=rounds(lambda one: one.alone_s, statistics.fmean),
        alone_slowest_s=rounds(lambda one: one.alone_s, max),
        read_s=statistics.fmean(one.read_s for ranks in passes for one in ranks),
    )


def check(study: Study) -> None:
    """Refuse a study that cannot be made."""
    most = max(study.ranks)
    if study.ranks[0] != 1 or list(study.ranks) != sorted(set(study.ranks)) or most < 2:
        raise Impossible(
            f"asked for {', '.join(map(str, study.ranks))} ranks",
            why="speed-up is over one rank, and numbers go up from there",
            fix="--ranks 1,2,4",
        )
    uneven = [number for number in study.ranks if study.whole % number]
    if uneven:
        raise Impossible(
            f"{study.whole} samples cannot be shared evenly by {uneven[0]} ranks",
            why="with strong scaling every rank gets as many",
            fix=f"--batch-size {most * max(1, study.whole // most)}",
        )
