"""The figures of a way to train, as the cells of a table that terminal and page share."""

from collections.abc import Sequence

from torchmuster.plan.answer import Answer, Forecast, name_of, recompute_of
from torchmuster.plan.planning import cost_of
from torchmuster.plan.timing.rates import CATALOGUED, PUBLISHED_SPREAD
from torchmuster.units import GiB, MiB

_SHORT = {"selective": "select"}


def table(answer: Answer, *, wide: bool = True) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return titles and rows; a narrow table leaves out what a screen has no room for."""
    size, unit = _scale(answer.table)
    with_cost = answer.asked.tokens is not None
    with_tensors = wide or not with_cost
    titles = ["way", "recompute", "batch"]
    with_reserved = any(one.memory.reserved_bytes is not None for one in answer.table)
    if with_tensors:
        titles += ["tensors", "reserved"] if with_reserved else ["tensors"]
    titles += [f"total {unit}", "at most", "fits", "step", _per_s(answer), "MFU"]
    if with_cost:
        titles += ["hours", "cost"]
    rows = [
        (
            *_way(one, answer.asked.hardware.cards),
            *(_memory(one, size)[: 1 + with_reserved] if with_tensors else ()),
            f"{one.memory.total_bytes / size:.1f}",
            f"{one.memory.high_bytes / size:.1f}",
            fits(one, size),
            *_speed(one),
            *(_cost(one, answer) if with_cost else ()),
        )
        for one in answer.table
    ]
    return tuple(titles), rows


def _scale(rows: Sequence[Forecast]) -> tuple[int, str]:
    largest = max(one.memory.total_bytes for one in rows)
    return (GiB, "GiB") if largest >= GiB else (MiB, "MiB")


def _per_s(answer: Answer) -> str:
    return "samples/s" if answer.tokens_per_sample is None else "tokens/s"


def remarks(answer: Answer) -> list[str]:
    """Say what is true of all times of a table: how far they may be off, where that is known."""
    if not any(one.time and one.time.origin == CATALOGUED.source for one in answer.table):
        return []
    low, high = PUBLISHED_SPREAD
    return [f"times are by usual rates: published trainings had {low} to {high} times these speeds"]


def scaling(answer: Answer) -> str | None:
    """Say what waiting for others costs the chosen way; None where nobody waits."""
    one = answer.chosen.value
    if one.time is None or one.candidate.layout.ranks == 1:
        return None
    efficiency = 100 * one.time.scaling_efficiency
    others = f"{answer.asked.hardware.card.noun}s"
    return f"efficiency {efficiency:.0f} %: the rest of a step waits for other {others}"


def _way(one: Forecast, cards: int) -> tuple[str, str, str]:
    candidate = one.candidate
    batch = str(candidate.micro_batch_size)
    if candidate.accumulation > 1:
        batch += f"x{candidate.accumulation}"
    again = recompute_of(candidate)
    name, ranks = name_of(candidate), candidate.layout.ranks
    if ranks not in (1, cards):  # beside it may be the same way over all of them
        name += f" over {ranks:,}"
    return name, _SHORT.get(again, again), batch


def _memory(one: Forecast, size: int) -> tuple[str, str]:
    reserved = one.memory.reserved_bytes
    return (
        f"{one.memory.tensor_bytes / size:.1f}",
        "-" if reserved is None else f"{reserved / size:.1f}",
    )


def fits(one: Forecast, size: int) -> str:
    """Say whether a way fits, or how much is missing."""
    if one.fits:
        return "yes"
    if one.spare_bytes >= 0:
        return "no: host"
    missing = f"{-one.spare_bytes / size:,.1f}"
    return f"tight -{missing}" if one.is_tight else f"-{missing}"


def _speed(one: Forecast) -> tuple[str, str, str]:
    time = one.time
    if time is None:
        return "-", "-", "-"
    per_s = time.tokens_per_s if time.tokens_per_s is not None else one.samples_per_s or 0.0
    mfu = "-" if time.mfu is None else f"{100 * time.mfu:.0f} %"
    return seconds(time.step_s), number(per_s), mfu


def _cost(one: Forecast, answer: Answer) -> tuple[str, str]:
    cost = cost_of(one, answer.asked)
    if cost is None:
        return "-", "-"
    return number(cost.hours), "-" if cost.price is None else number(cost.price)


def seconds(amount: float) -> str:
    """Write a step's time with three figures."""
    if amount < 1:
        return f"{amount * 1000:.3g} ms"
    return f"{amount:.3g} s" if amount < 1000 else f"{amount:,.0f} s"


def number(amount: float) -> str:
    """Write an amount so that its size can be seen: ``12,300``, ``4.2 M``."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if amount >= size:
            return f"{amount / size:.3g} {name}"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
