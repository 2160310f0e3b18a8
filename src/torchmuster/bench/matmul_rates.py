"""What measured products reached: rates, shares of the card's peak, which number type is fastest."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.bench.matmul import MatmulAnswer, Product, Shape
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.decision import Decision
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.model import Card

# A number type is worth taking from here on: less is not worth the digits that it loses.
_WORTH = 1.1


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one product reached."""

    product: Product
    flops_s: Estimate
    peak_flops_s: float | None  # of the card in this number type; None: nobody says

    @property
    def share(self) -> float | None:
        """What was reached of the peak."""
        return None if self.peak_flops_s is None else self.flops_s.median / self.peak_flops_s


def best_type(rates: Sequence[Rate]) -> Decision[str]:
    """Return the number type in which products are fastest, where it gains enough over float32."""
    mine = [one for one in rates if one.product.on_cpu == all(r.product.on_cpu for r in rates)]
    taken_s = {one: total_s(mine, one) for one in types_of(mine)}
    plain_s = taken_s.get("float32")
    if plain_s is None or len(taken_s) < 2:
        return Decision(value="float32", reason="no other number type was measured")
    best = min(taken_s, key=lambda one: taken_s[one])
    gains = {one: plain_s / one_s for one, one_s in taken_s.items() if one != "float32"}
    others = ", ".join(f"{one} {gain:.3g} times" for one, gain in gains.items())
    if best == "float32" or gains[best] < _WORTH:
        return Decision(
            value="float32", reason=f"nothing else multiplies these much faster ({others})"
        )
    return Decision(
        value=best,
        reason=f"multiplies these shapes {gains[best]:.3g} times as fast as float32"
        + (f" ({others})" if len(gains) > 1 else "")
        + "; what a whole training gains is measured by muster bench precision",
    )


def total_s(rates: Sequence[Rate], number_type: str) -> float:
    """Return what all shapes take that were measured in every type."""
    common = set.intersection(
        *(
            {one.product.shape for one in rates if one.product.number_type == each}
            for each in types_of(rates)
        )
    )
    return sum(
        one.product.shape.times * one.product.shape.flops / one.flops_s.median
        for one in rates
        if one.product.number_type == number_type and one.product.shape in common
    )


def types_of(rates: Sequence[Rate]) -> list[str]:
    """Return the number types, each once."""
    return list(dict.fromkeys(one.product.number_type for one in rates))


def card_of(answer: MatmulAnswer) -> Card | None:
    """Return what the catalogue knows of the device; None for a CPU, and for cards that are not in it."""
    known = None if answer.device == "cpu" else catalogue.find(answer.device_name)
    return None if known is None else known.card


def rate_of(product: Product, card: Card | None) -> Rate:
    """Return what a product reached, beside the peak where a source gives one."""
    peak = None
    if card is not None and not product.on_cpu:
        peak = card.flops.get(product.number_type)
    return Rate(
        product=product,
        flops_s=estimate([product.shape.flops / one for one in product.call_s]),
        peak_flops_s=peak,
    )


def speed_ups(rates: Sequence[Rate]) -> dict[str, list[tuple[float, float]]]:
    """Return by number type how many times as fast the accelerator is as the CPU, at each size."""
    cpu: dict[tuple[str, Shape], float] = {
        (one.product.number_type, one.product.shape): one.flops_s.median
        for one in rates
        if one.product.on_cpu
    }
    gains: dict[str, list[tuple[float, float]]] = {}
    for one in rates:
        beside = cpu.get((one.product.number_type, one.product.shape))
        if not one.product.on_cpu and beside is not None:
            point = (float(one.product.shape.rows), one.flops_s.median / beside)
            gains.setdefault(one.product.number_type, []).append(point)
    return gains
