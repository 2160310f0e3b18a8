"""What more ranks bring: real steps on 1, 2, 4, … ranks of this machine, with and without each other's gradients.

Portions tell it all. One rank takes ``whole`` samples a step. With n ranks, *weak* scaling leaves each rank the whole, *strong*
scaling gives it whole / n. Each number of ranks is also timed with the portions of all larger numbers: what only
smaller portions cost is then known from fewer ranks, and a forecast can be made from them.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.bench import bandwidth
from torchmuster.bench.probing import run_probe
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.errors import Impossible
from torchmuster.plan.job import Work

PROGRAM = "torchmuster.bench.probes.scaling"
Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


@dataclass(frozen=True, kw_only=True)
class ScalingStudy:
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
class ScalingRequest:
    """What each rank is told."""

    study: ScalingStudy
    portions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One rank's seconds for steps of one portion: a sample for each round."""

    step_s: tuple[float, ...]  # whole steps
    alone_s: tuple[
        float, ...
    ]  # the same without anything sent; all ranks at once; of one rank, its steps
    read_s: float  # of the latter, what reading the data took: the median


@dataclass(frozen=True, kw_only=True)
class ScalingTimes:
    """What one rank saw."""

    rank: int
    device: str
    backend: str
    sent_bytes: int  # gradients of a step
    shards: int  # parts of the model that fsdp gathers one by one; 0 under ddp
    by_portion: Mapping[int, StepTimes]
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


def measure_scaling(
    study: ScalingStudy, *, say: Callable[[str], None] = lambda _: None
) -> dict[int, OnRanks]:
    """Time the study's steps with each number of ranks, in several passes; return all of it by number of ranks."""
    seen: dict[int, list[list[ScalingTimes]]] = {number: [] for number in study.ranks}
    for turn in range(study.passes):
        for number in study.ranks:
            words = f"{number} {'rank' if number == 1 else 'ranks'}"
            say(f"pass {turn + 1} of {study.passes}: steps on {words}")
            seen[number].append(
                run_probe(
                    PROGRAM,
                    ScalingRequest(study=study, portions=study.portions(number)),
                    ScalingTimes,
                    ranks=number,
                    device=study.device,
                    folder=study.work.folder,
                    environment={} if study.threads is None else _threads(study.threads),
                    doing="timing steps",
                    say=say,
                )
            )
    return {number: join_scaling_times(passes) for number, passes in seen.items()}


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def join_scaling_times(passes: Sequence[Sequence[ScalingTimes]]) -> OnRanks:
    """Put together what the ranks of one or several passes saw."""
    first = passes[0][0]
    return OnRanks(
        ranks=len(passes[0]),
        sent_bytes=first.sent_bytes,
        shards=first.shards,
        backend=first.backend,
        by_portion={
            portion: _scaling_taken(
                [[one.by_portion[portion] for one in ranks] for ranks in passes]
            )
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


def _scaling_taken(passes: Sequence[Sequence[StepTimes]]) -> Taken:
    def rounds(
        of: Callable[[StepTimes], tuple[float, ...]], join: Callable[[tuple[float, ...]], float]
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


def check_scaling_request(study: ScalingStudy) -> None:
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


IDEAL = "ideal"
SMALLER, BESIDE, DATA = "smaller portions", "computing beside others", "data"
IMBALANCE, COMMUNICATION = "imbalance", "exposed communication"
LOSSES = (SMALLER, BESIDE, DATA, IMBALANCE, COMMUNICATION)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One number of ranks in one mode, held against one rank."""

    ranks: int
    mode: Mode
    portion: int  # samples of each rank
    step_s: Estimate
    throughput: Estimate  # samples a second of all ranks
    speed_up: Estimate  # in throughput, over one rank
    parts_s: Mapping[str, float]  # of the step: the ideal and the losses; they add up to it

    @property
    def efficiency(self) -> Estimate:
        """The speed-up over the number of ranks."""
        return _scaling_times(self.speed_up, 1 / self.ranks)

    @property
    def worst_loss(self) -> str | None:
        """The loss that takes most; None where nothing is lost."""
        losses = {name: self.parts_s[name] for name in LOSSES}
        worst = max(losses, key=lambda name: losses[name])
        return worst if losses[worst] > 0 else None


def scaled(study: ScalingStudy, measured: Mapping[int, OnRanks], ranks: int, mode: Mode) -> Scaled:
    """Hold what was measured with so many ranks against one rank."""
    portion = study.portion(ranks, mode)
    one = measured[1].by_portion
    step = estimate(measured[ranks].by_portion[portion].step_s)
    throughput = _over(portion * ranks, step)
    alone = _over(study.whole, estimate(one[study.whole].step_s))
    return Scaled(
        ranks=ranks,
        mode=mode,
        portion=portion,
        step_s=step,
        throughput=throughput,
        speed_up=Estimate(
            median=throughput.median / alone.median,
            low=throughput.low / alone.high,
            high=throughput.high / alone.low,
            count=min(throughput.count, alone.count),
        ),
        parts_s=_scaling_parts(study, measured, ranks, mode),
    )


def _scaling_parts(
    study: ScalingStudy, measured: Mapping[int, OnRanks], ranks: int, mode: Mode
) -> dict[str, float]:
    portion = study.portion(ranks, mode)
    one, many = measured[1].by_portion, measured[ranks].by_portion[portion]
    whole_s, portion_s = _median(one[study.whole].step_s), _median(one[portion].step_s)
    read_s = many.read_s - one[portion].read_s
    parts = {
        IDEAL: whole_s if mode == "weak" else whole_s / ranks,
        SMALLER: 0.0 if mode == "weak" else portion_s - whole_s / ranks,
        BESIDE: _median(many.alone_s) - portion_s - read_s,
        DATA: read_s,
        IMBALANCE: _median(many.alone_slowest_s) - _median(many.alone_s),
        COMMUNICATION: _median(many.step_s) - _median(many.alone_slowest_s),
    }
    return settled(parts, _median(many.step_s))


def settled(parts: Mapping[str, float], whole_s: float) -> dict[str, float]:
    """Return parts of which none is negative and which add up to the whole, the ideal as it is if it can be."""
    ideal_s = min(parts[IDEAL], whole_s)
    losses = {name: max(0.0, parts[name]) for name in LOSSES}
    total_s = sum(losses.values())
    share = (whole_s - ideal_s) / total_s if total_s else 0.0
    if not total_s:
        ideal_s = whole_s
    return {IDEAL: ideal_s, **{name: value * share for name, value in losses.items()}}


def _median(samples: tuple[float, ...]) -> float:
    return estimate(samples).median


def _over(amount: float, time: Estimate) -> Estimate:
    return Estimate(
        median=amount / time.median,
        low=amount / time.high,
        high=amount / time.low,
        count=time.count,
    )


def _scaling_times(one: Estimate, factor: float) -> Estimate:
    return Estimate(
        median=one.median * factor, low=one.low * factor, high=one.high * factor, count=one.count
    )


@dataclass(frozen=True, kw_only=True)
class ScalingForecast:
    """A step that was not taken, or not looked at."""

    ranks: int
    mode: Mode
    portion: int
    step_s: float
    computing_s: float
    waiting_s: float  # for slower ranks
    sending_s: float
    from_ranks: tuple[int, ...]

    @property
    def throughput(self) -> float:
        """Samples a second of all ranks."""
        return self.portion * self.ranks / self.step_s


@dataclass(frozen=True, kw_only=True)
class CheckedForecast:
    """A forecast beside what was then measured."""

    forecast: ScalingForecast
    measured: Scaled

    @property
    def error(self) -> float:
        """How far the forecast throughput is off."""
        return self.forecast.throughput / self.measured.throughput.median - 1


def forecast_scaling(
    study: ScalingStudy, measured: Mapping[int, OnRanks], ranks: int, mode: Mode, *, few: int
) -> ScalingForecast | None:
    """Forecast a step of so many ranks from those of one rank and of ``few``; None without such a portion there."""
    portion = study.whole if mode == "weak" else study.whole // ranks
    if portion not in measured[1].by_portion or portion not in measured[few].by_portion:
        return None
    one, some = measured[1].by_portion[portion], measured[few].by_portion[portion]
    turns = study.crowding(ranks) / study.crowding(few)
    alone_s, beside_s = _median(one.alone_s), _median(some.alone_s)
    together = ranks if study.slots is None else min(ranks, max(few, study.slots))
    slower_s = max(0.0, beside_s - alone_s) / (few - 1) * (together - few)
    computing_s = (beside_s + slower_s) * turns
    waiting_s = (_median(some.alone_slowest_s) - beside_s) * turns
    exposed_s = max(0.0, _median(some.step_s) - _median(some.alone_slowest_s))
    sending_s = _sending_s(study, measured[few], ranks, portion, exposed_s, turns)
    return ScalingForecast(
        ranks=ranks,
        mode=mode,
        portion=portion,
        step_s=computing_s + waiting_s + sending_s,
        computing_s=computing_s,
        waiting_s=waiting_s,
        sending_s=sending_s,
        from_ranks=(1, few),
    )


def checked_forecasts(
    study: ScalingStudy, measured: Mapping[int, OnRanks]
) -> list[CheckedForecast]:
    """Forecast the largest number of ranks from the two smallest, and put what was measured beside it."""
    few, most = study.ranks[1], study.ranks[-1]
    if most == few:
        return []
    found = []
    for mode in MODES:
        made = forecast_scaling(study, measured, most, mode, few=few)
        if made is not None:
            found.append(
                CheckedForecast(forecast=made, measured=scaled(study, measured, most, mode))
            )
    return found


def _sending_s(
    study: ScalingStudy, few: OnRanks, ranks: int, portion: int, exposed_s: float, turns: float
) -> float:
    """Return what ``exposed_s`` among a few becomes among so many ranks, which take so many turns."""
    carried = ((ranks - 1) / ranks) / ((few.ranks - 1) / few.ranks)
    line = bandwidth.fit_alpha_beta(few.messages_s)
    if line is None or not line.bytes_s:
        return exposed_s * carried * turns
    latency_s, bytes_s = line.latency_s, few.sent_bytes / line.bytes_s
    if few.shards:
        # Weights are gathered before each micro-batch's forward and backward, gradients scattered once: half an all-reduce each.
        messages = 1 + 2 * math.ceil(portion / (study.micro_batch_size or portion))
        latency_s, bytes_s = few.shards * messages * latency_s, messages / 2 * bytes_s
    passes = (ranks - 1) / (few.ranks - 1)
    growth = (latency_s * passes + bytes_s * carried * turns) / (latency_s + bytes_s)
    for_messages_s = min(exposed_s, latency_s + bytes_s)
    return for_messages_s * growth + (exposed_s - for_messages_s) * turns
