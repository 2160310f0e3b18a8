"""Scaling study: real steps on 1, 2, 4, … local ranks, with and without exchanging gradients.

One rank processes ``whole`` samples per step. With n ranks, each rank gets a portion: the whole in
*weak* scaling, whole / n in *strong* scaling. Each number of ranks is also timed with the portions
of all larger numbers, so that the cost of smaller portions is known from fewer ranks and can be
used for a forecast.
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
    """The request: training, numbers of ranks, and timing."""

    work: Work
    strategy: Literal["ddp", "fsdp"]
    precision: Literal["fp32", "bf16", "fp16"]
    ranks: tuple[int, ...]  # numbers of ranks, ascending, the first is 1
    whole: int  # samples of a step of one rank
    micro_batch_size: int | None  # maximum samples at once; None: the whole portion
    workers: int  # loader workers per rank
    device: Literal["cpu", "gpu"]
    threads: int | None  # of each rank, on the CPU
    slots: int | None  # ranks with exclusive cores or a device; None: unknown
    rounds: int
    passes: int  # over all numbers of ranks

    def portions(self, ranks: int) -> tuple[int, ...]:
        """Return the portions to time with this number of ranks, largest first."""
        of_strong = (self.whole // number for number in self.ranks if number >= ranks)
        return tuple(sorted({self.whole, *of_strong}, reverse=True))

    def portion(self, ranks: int, mode: Mode) -> int:
        """Return the samples of each rank."""
        return self.whole if mode == "weak" else self.whole // ranks

    def crowding(self, ranks: int) -> float:
        """Return how many ranks share the cores or device of one rank; 1 if there are enough."""
        return 1.0 if self.slots is None else max(1.0, ranks / self.slots)


@dataclass(frozen=True, kw_only=True)
class ScalingRequest:
    """The request to each rank."""

    study: ScalingStudy
    portions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One rank's seconds for steps of one portion: a sample for each round."""

    step_s: tuple[float, ...]  # whole steps
    alone_s: tuple[
        float, ...
    ]  # the same without communication, all ranks at once; for one rank, its steps
    read_s: float  # median data loading time of the latter


@dataclass(frozen=True, kw_only=True)
class ScalingTimes:
    """The result of one rank."""

    rank: int
    device: str
    backend: str
    sent_bytes: int  # gradients of a step
    shards: int  # FSDP units that are gathered one by one; 0 with DDP
    by_portion: Mapping[int, StepTimes]
    messages_s: Mapping[int, tuple[float, ...]] = field(
        default_factory=dict
    )  # all-reduces, by bytes


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The times of all ranks for steps of one portion, by round."""

    step_s: tuple[float, ...]  # of the slowest rank, for which the others wait
    alone_s: tuple[float, ...]  # the mean of the ranks
    alone_slowest_s: tuple[float, ...]
    read_s: float  # the mean of the ranks


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """All measurements with one number of ranks."""

    ranks: int
    sent_bytes: int
    shards: int
    backend: str
    by_portion: Mapping[int, Taken]
    messages_s: Mapping[int, tuple[float, ...]]  # all-reduces on the slowest rank, by bytes


def measure_scaling(
    study: ScalingStudy, *, say: Callable[[str], None] = lambda _: None
) -> dict[int, OnRanks]:
    """Time the steps with each number of ranks in several passes; return the results by ranks."""
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
    """Merge the results of the ranks over one or several passes."""
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
    """Reject an invalid study."""
    most = max(study.ranks)
    if study.ranks[0] != 1 or list(study.ranks) != sorted(set(study.ranks)) or most < 2:
        raise Impossible(
            f"invalid numbers of ranks: {', '.join(map(str, study.ranks))}",
            why="the first number must be 1, as speed-up is relative to one rank, and the numbers "
            "must increase",
            fix="--ranks 1,2,4",
        )
    uneven = [number for number in study.ranks if study.whole % number]
    if uneven:
        raise Impossible(
            f"{study.whole} samples cannot be split evenly over {uneven[0]} ranks",
            why="with strong scaling every rank gets the same number of samples",
            fix=f"--batch-size {most * max(1, study.whole // most)}",
        )


IDEAL = "ideal"
SMALLER, BESIDE, DATA = "smaller portions", "contention between ranks", "data"
IMBALANCE, COMMUNICATION = "imbalance", "exposed communication"
LOSSES = (SMALLER, BESIDE, DATA, IMBALANCE, COMMUNICATION)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One number of ranks in one mode, compared with one rank."""

    ranks: int
    mode: Mode
    portion: int  # samples of each rank
    step_s: Estimate
    throughput: Estimate  # samples/s of all ranks
    speed_up: Estimate  # in throughput, over one rank
    parts_s: Mapping[str, float]  # ideal time and losses; their sum is the step time

    @property
    def efficiency(self) -> Estimate:
        """The speed-up over the number of ranks."""
        return _scaling_times(self.speed_up, 1 / self.ranks)

    @property
    def worst_loss(self) -> str | None:
        """The largest loss; None if nothing is lost."""
        losses = {name: self.parts_s[name] for name in LOSSES}
        worst = max(losses, key=lambda name: losses[name])
        return worst if losses[worst] > 0 else None


def scaled(study: ScalingStudy, measured: Mapping[int, OnRanks], ranks: int, mode: Mode) -> Scaled:
    """Compare the measurement with this number of ranks with one rank."""
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
    """Return non-negative parts that add up to the whole; keep the ideal unchanged if possible."""
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
    """A forecast step."""

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
        """Samples/s of all ranks."""
        return self.portion * self.ranks / self.step_s


@dataclass(frozen=True, kw_only=True)
class CheckedForecast:
    """A forecast and the corresponding measurement."""

    forecast: ScalingForecast
    measured: Scaled

    @property
    def error(self) -> float:
        """The relative error of the forecast throughput."""
        return self.forecast.throughput / self.measured.throughput.median - 1


def forecast_scaling(
    study: ScalingStudy, measured: Mapping[int, OnRanks], ranks: int, mode: Mode, *, few: int
) -> ScalingForecast | None:
    """Forecast a step from those of one rank and of ``few``; None if that portion was not timed."""
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
    """Forecast the largest number of ranks from the two smallest, and compare."""
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
    """Scale ``exposed_s`` of few ranks to more ranks that share cores in turns."""
    carried = ((ranks - 1) / ranks) / ((few.ranks - 1) / few.ranks)
    line = bandwidth.fit_alpha_beta(few.messages_s)
    if line is None or not line.bytes_s:
        return exposed_s * carried * turns
    latency_s, bytes_s = line.latency_s, few.sent_bytes / line.bytes_s
    if few.shards:
        # Weights are gathered before each forward and backward of a micro-batch, gradients
        # scattered
        # once: half an all-reduce each.
        messages = 1 + 2 * math.ceil(portion / (study.micro_batch_size or portion))
        latency_s, bytes_s = few.shards * messages * latency_s, messages / 2 * bytes_s
    passes = (ranks - 1) / (few.ranks - 1)
    growth = (latency_s * passes + bytes_s * carried * turns) / (latency_s + bytes_s)
    for_messages_s = min(exposed_s, latency_s + bytes_s)
    return for_messages_s * growth + (exposed_s - for_messages_s) * turns
