"""What a whole training takes: hours, and money where a price is known."""

from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.plan.hardware.model import Hardware
from torchmuster.plan.timing.forecast import StepTime

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A whole training, without interruptions, saves and evaluations."""

    hours: float
    card_hours: float
    price: float | None  # in the currency of the price of a card's hour


def forecast(
    step: StepTime, hardware: Hardware, *, tokens: float | None = None, samples: float | None = None
) -> Forecast:
    """Return what so many tokens, or samples, take at the speed of a step."""
    if tokens is not None and step.tokens_per_s is None:
        raise Impossible(
            f"asked how long {tokens:.3g} tokens take",
            why="the model's samples are not made of tokens",
            fix="ask for a number of samples",
        )
    seconds = (samples or 0.0) / step.samples_per_s
    if tokens is not None and step.tokens_per_s is not None:
        seconds = tokens / step.tokens_per_s
    hours = seconds / _HOUR_S
    card_hours = hours * hardware.cards
    price = hardware.price_per_card_hour
    return Forecast(
        hours=hours, card_hours=card_hours, price=None if price is None else card_hours * price
    )
