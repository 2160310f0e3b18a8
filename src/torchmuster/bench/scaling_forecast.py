"""The step on more ranks, forecast from steps on one and on a few: computing, waiting and sending, each by its own rule.

- Computing is slower beside others. As long as every rank has cores or a device to itself, by as much for each further
  rank as was measured; ranks beyond that take turns, and a step lasts as many turns.
- What waits for messages grows as messages do: their latency with the passes of a ring, their bytes with what a ring carries,
  2 (n - 1) / n of the gradients, in the proportion of the measured line (``alpha_beta.py``). What a step takes beyond that
  is the strategy's own work, as fsdp's copies into and out of its shards: it is the same on every number of ranks. Ranks that
  take turns on a core do that work and carry bytes in turns; a latency is waiting, and keeps no core.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.bench import alpha_beta
from torchmuster.bench.scaling import MODES, Mode, OnRanks, Study
from torchmuster.bench.scaling_losses import Scaled, scaled
from torchmuster.bench.statistics import estimate


@dataclass(frozen=True, kw_only=True)
class Forecast:
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
class Checked:
    """A forecast beside what was then measured."""

    forecast: Forecast
    measured: Scaled

    @property
    def error(self) -> float:
        """How far the forecast throughput is off."""
        return self.forecast.throughput / self.measured.throughput.median - 1


def forecast(
    study: Study, measured: Mapping[int, OnRanks], ranks: int, mode: Mode, *, few: int
) -> Forecast | None:
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
    return Forecast(
        ranks=ranks,
        mode=mode,
        portion=portion,
        step_s=computing_s + waiting_s + sending_s,
        computing_s=computing_s,
        waiting_s=waiting_s,
        sending_s=sending_s,
        from_ranks=(1, few),
    )


def checked_forecasts(study: Study, measured: Mapping[int, OnRanks]) -> list[Checked]:
    """Forecast the largest number of ranks from the two smallest, and put what was measured beside it."""
    few, most = study.ranks[1], study.ranks[-1]
    if most == few:
        return []
    found = []
    for mode in MODES:
        made = forecast(study, measured, most, mode, few=few)
        if made is not None:
            found.append(Checked(forecast=made, measured=scaled(study, measured, most, mode)))
    return found


def _sending_s(
    study: Study, few: OnRanks, ranks: int, portion: int, exposed_s: float, turns: float
) -> float:
    """Return what ``exposed_s`` among a few becomes among so many ranks, which take so many turns."""
    carried = ((ranks - 1) / ranks) / ((few.ranks - 1) / few.ranks)
    line = alpha_beta.fit(few.messages_s)
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


def _median(samples: tuple[float, ...]) -> float:
    return estimate(samples).median
