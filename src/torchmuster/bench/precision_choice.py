"""Which precision to train in: the fastest that learns as well as fp32."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench.precision import PrecisionAnswer, Way
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.decision import Decision

_WORTH = 1.1  # times as fast as fp32: less is not worth the digits
_AS_GOOD = 0.95  # bf16 with so much of fp16's speed is better: it needs no loss scale
_ALLOWED_DIFFERENCE = 0.01  # of the loss, where another order of the data changes less than that

Units = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A precision beside fp32."""

    way: Way
    step_s: Estimate
    gain: float  # times as fast
    gain_low: float  # at least, as far as the noise tells
    memory_share: float
    loss_difference: float | None  # as a share of fp32's loss; None: one of them is not finite


def compare(answer: PrecisionAnswer) -> list[Compared]:
    """Hold every precision against fp32, which is the first."""
    plain = answer.ways[0]
    plain_s = estimate(plain.step_s)
    found = []
    for way in answer.ways:
        step_s = estimate(way.step_s)
        found.append(
            Compared(
                way=way,
                step_s=step_s,
                gain=plain_s.median / step_s.median,
                gain_low=plain_s.low / step_s.high,
                memory_share=way.peak_bytes / plain.peak_bytes,
                loss_difference=difference(way.held_loss, plain.held_loss),
            )
        )
    return found


def difference(one: float | None, other: float | None) -> float | None:
    """Return by which share a loss is larger than another; None where one is not finite."""
    return None if one is None or not other else one / other - 1


def allowed_difference(answer: PrecisionAnswer) -> float:
    """Return by how much a loss may differ from fp32's: as another order of the data would change it."""
    changed = difference(answer.other_order_loss, answer.ways[0].held_loss)
    return max(_ALLOWED_DIFFERENCE, abs(changed or 0.0))


def choose(answer: PrecisionAnswer, units: Units | None) -> Decision[str]:
    """Choose the fastest precision that trains as well as fp32; fp32 where none gains enough.

    ``units`` are what the CPU has for 16-bit numbers; None on accelerators, or where nobody says.
    """
    allowed = allowed_difference(answer)
    compared = compare(answer)
    refused: list[str] = []
    good: dict[str, Compared] = {}
    for one in compared[1:]:
        name = one.way.precision
        if one.way.trouble or one.loss_difference is None:
            refused.append(f"{name} gave numbers that are not finite")
        elif abs(one.loss_difference) > allowed:
            refused.append(f"{name}'s loss differs by {one.loss_difference:+.1%}")
        elif one.gain < _WORTH:
            refused.append(f"{name} is {one.gain:.2g} times as fast{_no_unit(name, units)}")
        elif one.gain_low <= 1.0:
            refused.append(f"{name} is {one.gain:.2g} times as fast, which may be noise")
        else:
            good[name] = one
    refused += [f"{name}: {why}" for name, why in answer.missing.items()]
    beside = f"; {'; '.join(refused)}" if refused else ""
    if not good:
        return Decision(value="fp32", reason=f"nothing else is worth it here{beside}")
    best = max(good.values(), key=lambda one: one.gain)
    if "bf16" in good and good["bf16"].gain >= _AS_GOOD * best.gain:
        best = good["bf16"]
    return Decision(
        value=best.way.precision,
        reason=f"{best.gain:.2g} times as fast as fp32 with {best.memory_share:.0%} of its memory; after "
        f"{len(best.way.losses)} steps its loss differs by {best.loss_difference:+.2%} (allowed: "
        f"{allowed:.2%}){beside}",
    )


def _no_unit(name: str, units: Units | None) -> str:
    if units is None or name not in units:
        return ""
    known = ", ".join(units[name])
    return f" (this CPU's unit for it: {known})" if known else " (this CPU has no unit for it)"
