"""What failures cost a long run: how often they come, how often to save, how many spares are worth having."""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

# "The Llama 3 Herd of Models" (2024), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
PUBLISHED = "419 failures in 54 days on 16,384 GPUs (Llama 3, 2024)"
_DAY_S = 86_400.0
PERIOD_S = 30 * _DAY_S  # that is played
_MONTHS = 20  # played for each number of spares
_WORSE_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The hosts of a run, and how often one fails."""

    hosts: int
    gpus_per_host: int
    spares: int = 0
    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE
    repair_s: float = _DAY_S  # until a failed host can be used again
    elastic: bool = False  # without a spare, continue with fewer hosts; else wait for the repair

    @property
    def failure_every_s(self) -> float:
        """The mean time between failures of any of the hosts."""
        return self.gpu_hours_per_failure * 3600 / (self.hosts * self.gpus_per_host)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long saving and recovering take."""

    stall_s: float  # training waits for a save
    save_s: float  # between the beginning of a save and its commit
    restart_s: float  # from a failure to the next step, if no spare is left
    takeover_s: float  # the same, if a spare takes the place of the lost host


@dataclass(frozen=True, kw_only=True)
class PlayedMonth:
    """One simulated period; times are shares of it."""

    failures: int
    takeovers: int
    training: float
    saving: float
    lost_work: float
    recovering: float
    goodput: float  # useful work, as a share of what the hosts could do without failures
    of_paid: float  # the same, with the spares among the hosts


def best_interval_s(costs: Costs, fleet: Fleet) -> float:
    """Return how often to save: Young's optimum, but not before the last save is committed."""
    young_s = math.sqrt(2 * costs.stall_s * fleet.failure_every_s)
    return max(young_s, costs.save_s)


def expected_goodput(interval_s: float, costs: Costs, fleet: Fleet) -> float:
    """Return the share of time spent on work that is not lost, to first order."""
    recovery_s = costs.takeover_s if fleet.spares else costs.restart_s
    if not fleet.spares and not fleet.elastic:
        recovery_s += fleet.repair_s
    lost_s = interval_s / 2 + costs.save_s + recovery_s
    return max(0.0, (1 - costs.stall_s / interval_s) / (1 + lost_s / fleet.failure_every_s))


def play(
    fleet: Fleet, costs: Costs, interval_s: float, *, period_s: float = PERIOD_S, seed: int = 0
) -> PlayedMonth:
    """Play a run: hosts fail at random times and return repaired; a spare, a restart or a wait follows each failure."""
    draw = random.Random(seed)
    end_s = period_s
    host_fails_every_s = fleet.failure_every_s * fleet.hosts
    now_s, running, spares = 0.0, fleet.hosts, fleet.spares
    returns: list[float] = []  # times at which failed hosts are repaired
    useful = training_s = saving_s = lost_s = recovering_s = 0.0
    failures = takeovers = 0
    while now_s < end_s:
        active = running  # until the next event
        fails_s = math.inf
        if active:
            fails_s = now_s + draw.expovariate(active / host_fails_every_s)
        is_short = bool(returns) and running < fleet.hosts
        returns_s = max(now_s, returns[0]) if is_short else math.inf
        until_s = min(fails_s, returns_s, end_s)
        worked_s = until_s - now_s
        saves = worked_s // (interval_s + costs.stall_s)
        stalled_s = min(saves * costs.stall_s, worked_s)
        now_s = until_s
        down_s, again_s = 0.0, 0.0
        if until_s == fails_s < end_s:
            failures += 1
            heapq.heappush(returns, now_s + fleet.repair_s)
            while spares < fleet.spares and returns and returns[0] <= now_s:
                heapq.heappop(returns)
                spares += 1
            # What was done since the beginning of the last save that is complete is done again.
            since_s = draw.uniform(0, interval_s) + costs.save_s
            again_s = min(since_s, worked_s - stalled_s)
            if spares > 0:
                spares -= 1
                takeovers += 1
                down_s = costs.takeover_s
            elif fleet.elastic:
                running -= 1
                down_s = costs.restart_s
            else:
                down_s = max(0.0, heapq.heappop(returns) - now_s) + costs.restart_s
        elif until_s == returns_s:  # a repaired host rejoins: all ranks save and restart
            heapq.heappop(returns)
            running += 1
            down_s = costs.restart_s
        done_s = worked_s - stalled_s - again_s if active else 0.0
        useful += done_s * active
        training_s += done_s
        saving_s += stalled_s
        lost_s += again_s
        recovering_s += min(down_s, end_s - now_s)
        now_s += down_s
    return PlayedMonth(
        failures=failures,
        takeovers=takeovers,
        training=training_s / end_s,
        saving=saving_s / end_s,
        lost_work=lost_s / end_s,
        recovering=recovering_s / end_s,
        goodput=useful / (fleet.hosts * end_s),
        of_paid=useful / ((fleet.hosts + fleet.spares) * end_s),
    )


def value_of_spares(
    fleet: Fleet, costs: Costs, interval_s: float, *, most: int = 64
) -> list[tuple[int, float]]:
    """Return the useful work per paid host for 0, 1, 2, … spares, until more of them are no use."""
    found: list[tuple[int, float]] = []
    for spares in range(min(most, max(1, fleet.hosts)) + 1):
        given = replace(fleet, spares=spares)
        months = [play(given, costs, interval_s, seed=seed) for seed in range(_MONTHS)]
        found.append((spares, fmean(one.of_paid for one in months)))
        best = max(value for _, value in found)
        if all(value < best for _, value in found[-_WORSE_IN_A_ROW:]):
            break
    return found


def best_spares(values: Sequence[tuple[int, float]]) -> int:
    """Return the number of spares with the most useful work per paid host."""
    return max(values, key=lambda one: one[1])[0]
