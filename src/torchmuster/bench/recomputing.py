"""Which blocks to compute again in the backward: the ways there are, what each takes, and which is best."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.bench.statistics import estimate
from torchmuster.decision import Decision
from torchmuster.plan.job import Recompute
from torchmuster.units import format_bytes

# A step that is less than so much slower is as fast: nobody would notice.
EQUALLY_FAST = 0.02
# Less than this of the peak is not worth computing anything twice.
_WORTH_IT = 0.1
# A knee lies so far off the straight line from nothing to everything computed again, as a share of its length.
_KNEE = 0.15
_MOST_WAYS = 7


@dataclass(frozen=True, kw_only=True)
class Way:
    """What steps take with some of the blocks computed again."""

    recompute: Recompute  # as in train.activation_checkpointing
    blocks: int  # that are computed again
    peak_bytes: int | None  # at most alive in a step; None: it did not fit
    reserved_bytes: int | None = None  # by an accelerator's allocator; None on the CPU
    step_s: tuple[float, ...] = ()  # of whole steps; empty where it did not fit

    @property
    def needed_bytes(self) -> int | None:
        """What a device must have for it: what its allocator keeps, where there is one."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def usual_s(self) -> float:
        """The time of a step."""
        return statistics.median(self.step_s)

    @property
    def name(self) -> str:
        """What is computed again, in words."""
        return name_of(self.recompute)


def name_of(recompute: Recompute) -> str:
    """Return what is computed again, in words."""
    if recompute == "none":
        return "nothing"
    if recompute == "selective":
        return "selective"
    if recompute in (1, "full"):
        return "every block"
    ending = {2: "2nd", 3: "3rd"}.get(int(recompute), f"{recompute}th")
    return f"every {ending} block"


def ways_for(blocks: int) -> list[Recompute]:
    """Return what can be tried on a model of so many repeated blocks, what saves most first.

    Numbers that leave the same number of blocks to be computed again are the same way. Of a deep model not all are tried.
    """
    if not blocks:
        return ["none"]
    numbers: dict[int, int] = {}  # by how many blocks are computed again
    for every in range(1, blocks + 1):
        numbers.setdefault(blocks // every, every)
    chosen = list(numbers.values())
    while len(chosen) > _MOST_WAYS - 2:
        chosen = [*chosen[:2], *chosen[2:][::2]]
    return ["full" if every == 1 else every for every in chosen] + ["selective", "none"]


def best(ways: Sequence[Way], *, limit_bytes: int | None) -> Decision[Way] | None:
    """Choose: the fastest that stays within the limit, or where none is given the knee; None: nothing fits."""
    ran = [one for one in ways if one.peak_bytes is not None]
    if limit_bytes is not None:
        return _within(limit_bytes, [one for one in ran if (one.needed_bytes or 0) <= limit_bytes])
    if not ran:
        return None
    simplest = min(ran, key=lambda one: (one.blocks, one.recompute == "selective"))
    if simplest.recompute != "none":
        chosen = fastest(ran)
        return Decision(
            value=chosen,
            reason="the fastest of what fits on this device; with nothing computed again it runs out of "
            "memory",
        )
    return _knee(ran, simplest)


def fastest(ways: Sequence[Way]) -> Way:
    """Return the fastest; of those that are as fast, or within its noise, the one that computes least again."""
    quickest = estimate(min(ways, key=lambda one: one.usual_s).step_s)
    enough_s = max(quickest.high, quickest.median * (1 + EQUALLY_FAST))
    equal = [one for one in ways if one.usual_s <= enough_s]
    return min(equal, key=lambda one: (one.blocks, one.usual_s))


def _within(limit_bytes: int, fitting: Sequence[Way]) -> Decision[Way] | None:
    if not fitting:
        return None
    chosen = fastest(fitting)
    return Decision(
        value=chosen,
        reason=f"the fastest of {len(fitting)} that stay within {format_bytes(limit_bytes)}: "
        f"{_figures(chosen)}",
    )


def _knee(ways: Sequence[Way], nothing: Way) -> Decision[Way]:
    """Choose the way that saves much more than its share of the time, if there is one."""
    assert nothing.peak_bytes is not None
    least = min(ways, key=lambda one: one.peak_bytes or 0)
    saved = nothing.peak_bytes - (least.peak_bytes or 0)
    if saved < _WORTH_IT * nothing.peak_bytes:
        return Decision(
            value=nothing,
            reason=f"computing again saves at most {saved / nothing.peak_bytes * 100:.0f} % "
            f"of {format_bytes(nothing.peak_bytes)} ({least.name})",
        )
    slowest_s = max(one.usual_s for one in ways) - nothing.usual_s
    if slowest_s <= EQUALLY_FAST * nothing.usual_s:
        return Decision(
            value=least,
            reason=f"it saves most, and no way is slower by more than "
            f"{EQUALLY_FAST * 100:.0f} %; {_against(least, nothing)}",
        )

    def advantage(one: Way) -> float:
        gained = (nothing.peak_bytes or 0) - (one.peak_bytes or 0)
        return gained / saved - (one.usual_s - nothing.usual_s) / slowest_s

    knee = max(ways, key=advantage)
    noise = max(estimate(one.step_s).noise * one.usual_s for one in (knee, nothing)) / slowest_s
    if advantage(knee) > max(_KNEE, noise):
        return Decision(
            value=knee,
            reason=f"the knee of the curve: {_against(knee, nothing)}; more would cost "
            "more time for what it saves",
        )
    return Decision(
        value=nothing,
        reason="where memory suffices: no way saves more than its share of the time "
        f"({least.name}: {_against(least, nothing)}); with --limit SIZE the fastest that fits is found",
    )


def _against(one: Way, other: Way) -> str:
    assert one.peak_bytes is not None
    assert other.peak_bytes is not None
    less, more = 1 - one.peak_bytes / other.peak_bytes, one.usual_s / other.usual_s - 1
    return (
        f"{format_bytes(one.peak_bytes)} instead of {format_bytes(other.peak_bytes)} "
        f"({-less * 100:+.0f} %) for {more * 100:+.0f} % time"
    )


def _figures(one: Way) -> str:
    return f"{format_bytes(one.needed_bytes or 0)}, {one.usual_s * 1000:.0f} ms a step"
