"""Print a plan on one screen: request, table, memory of a GPU, choice, and the train command."""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.report.terminal import aligned_columns
from torchmuster.finding import render
from torchmuster.plan.answer import Answer, Forecast, Offer, candidate_name, recompute_of
from torchmuster.plan.hardware.cluster_file import describe_hardware
from torchmuster.plan.planning import cost_of
from torchmuster.plan.record import CATEGORIES
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.decide import (
    describe_candidate,
    describe_offer,
    describe_passed_over,
    samples_per_second,
)
from torchmuster.plan.timing.rates import CATALOGUED, PUBLISHED_SPREAD
from torchmuster.redaction import harmless
from torchmuster.units import GiB, MiB, format_bytes, plural

_SHORT = {"selective": "select"}


def plan_table(
    answer: Answer, *, wide: bool = True
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return titles and rows; a narrow table leaves out columns that do not fit on a screen."""
    size, unit = _scale(answer.table)
    with_cost = answer.asked.tokens is not None
    with_tensors = wide or not with_cost
    titles = ["strategy", "recompute", "batch"]
    with_reserved = any(one.memory.reserved_bytes is not None for one in answer.table)
    if with_tensors:
        titles += ["tensors", "reserved"] if with_reserved else ["tensors"]
    titles += [f"total {unit}", "at most", "fits", "step", _per_s(answer), "MFU"]
    if with_cost:
        titles += ["hours", "cost"]
    rows = [
        (
            *_way(one, answer.asked.hardware.cards),
            *(_terminal_memory(one, size)[: 1 + with_reserved] if with_tensors else ()),
            f"{one.memory.total_bytes / size:.1f}",
            f"{one.memory.high_bytes / size:.1f}",
            fits_text(one, size),
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


def plan_remarks(answer: Answer) -> list[str]:
    """Return remarks on all times of a table: how far they may be off, where that is known."""
    if not any(one.time and one.time.origin == CATALOGUED.source for one in answer.table):
        return []
    low, high = PUBLISHED_SPREAD
    return [
        f"computed with typical rates: published runs reached {low} to {high} times these speeds"
    ]


def scaling_table(answer: Answer) -> str | None:
    """Return the scaling efficiency of the chosen candidate; None with a single rank."""
    one = answer.chosen.value
    if one.time is None or one.candidate.layout.ranks == 1:
        return None
    efficiency = 100 * one.time.scaling_efficiency
    others = f"{answer.asked.hardware.card.noun}s"
    return f"efficiency {efficiency:.0f} %: the rest of a step is spent waiting for other {others}"


def _way(one: Forecast, cards: int) -> tuple[str, str, str]:
    candidate = one.candidate
    batch = str(candidate.micro_batch_size)
    if candidate.accumulation > 1:
        batch += f"x{candidate.accumulation}"
    again = recompute_of(candidate)
    name, ranks = candidate_name(candidate), candidate.layout.ranks
    if ranks not in (1, cards):  # the table may also have the same strategy over all of them
        name += f" over {ranks:,}"
    return name, _SHORT.get(again, again), batch


def _terminal_memory(one: Forecast, size: int) -> tuple[str, str]:
    reserved = one.memory.reserved_bytes
    return (
        f"{one.memory.tensor_bytes / size:.1f}",
        "-" if reserved is None else f"{reserved / size:.1f}",
    )


def fits_text(one: Forecast, size: int) -> str:
    """Return whether a candidate fits, or how much memory is missing."""
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
    return duration_text(time.step_s), plain_number(per_s), mfu


def _cost(one: Forecast, answer: Answer) -> tuple[str, str]:
    cost = cost_of(one, answer.asked)
    if cost is None:
        return "-", "-"
    return plain_number(cost.hours), "-" if cost.price is None else plain_number(cost.price)


def duration_text(amount: float) -> str:
    """Format a step's time with three significant digits."""
    if amount < 1:
        return f"{amount * 1000:.3g} ms"
    return f"{amount:.3g} s" if amount < 1000 else f"{amount:,.0f} s"


def plain_number(amount: float) -> str:
    """Format a number readably: ``12,300``, ``4.2 M``."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if amount >= size:
            return f"{amount / size:.3g} {name}"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One part of a GPU's memory."""

    name: str
    size_bytes: int
    source: str


def memory_parts(one: Forecast) -> list[MemoryPart]:
    """Return the parts of a GPU's memory: tensors by category, then allocator and context."""
    return [part for part in _terminal_parts(one) if part.size_bytes > 0]


def _terminal_parts(one: Forecast) -> Iterator[MemoryPart]:
    memory = one.memory
    for category in CATEGORIES:
        yield MemoryPart(
            name=category, size_bytes=memory.by_category.get(category, 0), source="traced tensors"
        )
    outside = sum(term.size_bytes for term in memory.outside)
    kept = memory.total_bytes - memory.tensor_bytes - outside
    source = "simulated" if memory.reserved_bytes is not None else "a typical share"
    yield MemoryPart(name="cached by the allocator", size_bytes=kept, source=source)
    for term in memory.outside:
        yield MemoryPart(name=term.name, size_bytes=term.size_bytes, source=term.source)


def spare(one: Forecast, asked: PlanRequest) -> int:
    """Return the free bytes of a GPU at the expected use; negative: that much is missing."""
    return asked.hardware.card.memory_bytes - one.memory.total_bytes


def place(one: Forecast) -> str:
    """Return where in a step the peak is."""
    peak = one.memory.where
    if peak is None:
        return "by a formula"
    where = f", block {peak.block}" if peak.block is not None else ""
    what = f", {peak.operation}" if peak.operation else ""
    return f"in the {peak.phase}{where}{what}"


_BAR = 40
_MOST_ROWS = 10
# Keep a number on one line with its unit: textwrap does not break at a no-break space.
_AMOUNT = re.compile(r"(\d) ([KMGT]iB|%|tokens/s|samples/s|GPUs?|ranks?)")
_JOINED = "\N{NO-BREAK SPACE}"


def plan_text(answer: Answer, *, line: str, width: int = 100, colour: bool = False) -> str:
    """Return the whole report; ``line`` is the command that trains with the chosen candidate."""
    blocks = [
        [plan_question(answer)],
        [*_terminal_table(answer, width)],
        [*_picture(answer)],
        [*_terminal_verdict(answer, width)],
        *([[*_offers(answer, width)]] if answer.offers else []),
        [*_sources(answer, width)],
    ]
    if answer.findings:
        blocks.append([render(answer.findings, width=width, colour=colour)])
    machines = math.ceil(
        answer.chosen.value.candidate.layout.ranks / answer.asked.hardware.cards_per_machine
    )
    where = f", on {machines:,} machines" if machines > 1 else ""
    blocks.append([f"train with this plan{where}:", f"  {line}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def plan_question(answer: Answer) -> str:
    """Return the request in one line."""
    asked = answer.asked
    parts_of_it = [str(asked.work.model_name_or_path or asked.work.build)]
    if answer.parameter_count is not None:
        parts_of_it.append(f"{plain_number(answer.parameter_count)} parameters")
    if answer.tokens_per_sample is not None:
        parts_of_it.append(f"{answer.tokens_per_sample:,} tokens per sample")
    if asked.global_batch_size is not None:
        parts_of_it.append(f"global batch {asked.global_batch_size:,}")
    card = asked.hardware.card
    where = (
        f"on {describe_hardware(asked.hardware)} "
        f"({format_bytes(card.memory_bytes)} per {card.noun})"
    )
    return harmless(f"{', '.join(parts_of_it)}, {where}")


def _terminal_table(answer: Answer, width: int) -> Iterator[str]:
    titles, rows = plan_table(answer, wide=False)
    yield from aligned_columns([titles, *rows[:_MOST_ROWS]])
    if len(rows) > _MOST_ROWS:
        yield f"{plural(len(rows) - _MOST_ROWS, 'more row')}: see --json or --html"
    for sentence in plan_remarks(answer):
        yield from _wrapped("speed", sentence, width)
    for sentence in describe_passed_over(answer.passed_over):
        yield from _wrapped("skipped", sentence, width)


def _picture(answer: Answer) -> Iterator[str]:
    one = answer.chosen.value
    whole = max(answer.asked.hardware.card.memory_bytes, one.memory.total_bytes)
    yield f"memory per {answer.asked.hardware.card.noun} at its peak, {place(one)}"
    left = spare(one, answer.asked)
    shown = [(part.name, part.size_bytes, "█") for part in memory_parts(one)]
    shown.append(("free", max(left, 0), "░"))
    longest = max(len(name) for name, _, _ in shown)
    for name, size, ink in shown:
        bar = ink * round(_BAR * size / whole)
        yield f"  {name:<{longest}}  {format_bytes(size):>9}  {bar}".rstrip()


def _terminal_verdict(answer: Answer, width: int) -> Iterator[str]:
    yield from _wrapped("chosen", answer.chosen.reason, width)
    if answer.runner_up is not None:
        yield from _wrapped("next", answer.runner_up.reason, width)
    for sentence in answer.would_change:
        yield from _wrapped("instead", sentence, width)
    if waiting := scaling_table(answer):
        yield from _wrapped("scaling", waiting, width)
    memory = answer.chosen.value.memory
    saving = f"a checkpoint takes {format_bytes(memory.save_bytes)} on disk"
    if memory.save_host_bytes:
        saving += f", and {format_bytes(memory.save_host_bytes)} of host memory for an async save"
    if memory.host_bytes:
        saving += f"; offload keeps {format_bytes(memory.host_bytes)} in host memory"
    yield from _wrapped("saving", saving, width)
    cost = cost_of(answer.chosen.value, answer.asked)
    if cost is not None and answer.asked.tokens is not None:
        words = f"{plain_number(answer.asked.tokens)} tokens take {plain_number(cost.hours)} hours"
        if cost.price is not None:
            words += f" and cost {plain_number(cost.price)}"
        yield from _wrapped("total", words, width)


OFFERS_REMARK = (
    "what was requested fits only with CPU offload, which is slow. LoRA needs less memory, but "
    "trains only small matrices, so it can learn less than full training. To use it, add its flags "
    "to muster plan or muster train"
)


def offer_text(offer: Offer) -> str:
    """Describe an offer: its configuration, memory per GPU and speed."""
    one, card = offer.forecast, offer.asked.hardware.card
    parts_of_it = [
        f"{format_bytes(one.memory.total_bytes)} of {format_bytes(card.memory_bytes)} per "
        f"{card.noun}, at most {format_bytes(one.memory.high_bytes)}"
    ]
    if not one.fits:
        parts_of_it[0] += f": {format_bytes(-one.spare_bytes)} too much"
    if one.memory.where is None:
        parts_of_it.append("estimated by a formula")
    if one.time is not None:
        parts_of_it += [f"{duration_text(one.time.step_s)} per step", samples_per_second(one)]
    return (
        f"{describe_offer(offer)}; {describe_candidate(one.candidate, card.noun)}: "
        f"{', '.join(parts_of_it)}"
    )


def _offers(answer: Answer, width: int) -> Iterator[str]:
    yield from _wrapped("offers", OFFERS_REMARK, width)
    for one in answer.offers:
        yield from _wrapped("offer", offer_text(one), width)
        yield f"{'':8}{one.flags}"


def _sources(answer: Answer, width: int) -> Iterator[str]:
    for kind, source in answer.sources:
        yield from _wrapped("source", f"{kind}: {source}", width)


def _wrapped(title: str, sentence: str, width: int) -> Sequence[str]:
    lines = textwrap.wrap(
        _AMOUNT.sub(rf"\1{_JOINED}\2", harmless(sentence)),
        width,
        initial_indent=f"{title:<8}",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINED, " ") for line in lines]
