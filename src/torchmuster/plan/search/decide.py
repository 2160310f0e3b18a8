"""Choose between forecasts: the choice with its reason, the runner-up, and what would change it."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torchmuster.decision import Decision
from torchmuster.plan.answer import Forecast, Offer, PassedOver, candidate_name, recompute_of
from torchmuster.plan.hardware.catalogue import Link
from torchmuster.plan.job import Candidate
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.candidates import (
    USUAL_MICRO_BATCH_SIZE,
    Explored,
    forecast_candidate,
    simplicity,
)
from torchmuster.plan.search.pruning import SAME_RATE
from torchmuster.plan.timing.rates import Rates
from torchmuster.units import format_bytes, plural

Way: TypeAlias = tuple[object, ...]
_HARDLY = 1.01
_LESS = 0.95  # share of the chosen candidate's memory: an alternative must need less than that
_MOST_REASONS = 5  # reasons for skipped candidates that fit on a screen
_AMOUNT = re.compile(r"[\d.,]+ [KMGT]iB")
_HYBRID = re.compile(r"hybrid \d+ x (\d+)(.*)")
_LARGEST_MICRO_BATCH = 4096
_WORTH_SAYING = 0.05  # least gain of faster links that is reported


def in_preference(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Order forecasts: those as fast as the fastest, the simplest first; then the rest likewise.

    Within one configuration, the fewest micro-batches come first; among these the fastest
    micro-batch size, unless the gain is negligible.
    """
    ordered: list[Forecast] = []
    for equal in _by_rate(forecasts, SAME_RATE):
        for _, alike in itertools.groupby(sorted(equal, key=_simple), key=_simple):
            for sizes in _by_rate(alike, _HARDLY):
                ordered += sorted(sizes, key=_portion)
    return ordered


def preferred(forecasts: Iterable[Forecast]) -> Forecast:
    """Return the preferred forecast; there must be one."""
    return in_preference(forecasts)[0]


def _by_rate(forecasts: Iterable[Forecast], same: float) -> Iterator[list[Forecast]]:
    """Yield groups of forecasts that are as fast as the fastest of those left."""
    left = sorted(forecasts, key=_decide_rate, reverse=True)
    while left:
        equal = [one for one in left if _decide_rate(one) * same >= _decide_rate(left[0])]
        yield equal
        left = left[len(equal) :]


def _decide_rate(one: Forecast) -> float:
    return one.samples_per_s or 0.0


def _simple(one: Forecast) -> tuple[float, ...]:
    *simple, _ = simplicity(one.candidate)
    return *simple, float(one.candidate.accumulation)


def _portion(one: Forecast) -> int:
    """Order equally fast micro-batches: small ones first, or large ones if no speed is known."""
    size = one.candidate.micro_batch_size
    return -size if one.samples_per_s is None else size


def candidate_text(candidate: Candidate) -> Way:
    """Return what identifies a candidate in the table: how the model is spread, and over how many GPUs."""
    return (
        candidate.strategy,
        candidate.reshard,
        candidate.cpu_offload,
        candidate.strategy == "fsdp" and candidate.layout.copies > 1,
        candidate.layout.ranks,
    )


def candidates_table(forecasts: Sequence[Forecast]) -> tuple[Forecast, ...]:
    """Return the best micro-batch per candidate: the preferred that fits, else the nearest miss."""
    best: dict[Way, Forecast] = {}
    for one in _in_order(forecasts):
        best.setdefault((*candidate_text(one.candidate), one.candidate.recompute), one)
    return tuple(_in_order(best.values()))


def _in_order(forecasts: Iterable[Forecast]) -> list[Forecast]:
    forecasts = list(forecasts)
    missing = sorted((one for one in forecasts if not one.fits), key=_missing_bytes)
    return [*in_preference(one for one in forecasts if one.fits), *missing]


def _missing_bytes(one: Forecast) -> int:
    return -min(one.spare_bytes, one.host_spare_bytes or one.spare_bytes)


def choose_candidate(
    explored: Explored, asked: PlanRequest
) -> tuple[Decision[Forecast], Decision[Forecast] | None]:
    """Return the choice among the forecasts that fit (at least one), and the runner-up."""
    fitting = in_preference(one for one in explored.forecasts if one.fits)
    best = fitting[0]
    fastest = max(map(_decide_rate, fitting))
    others = (one for one in fitting if not _is_alike(one.candidate, best.candidate))
    second = next(others, None)
    noun = asked.hardware.card.noun
    reason = f"{describe_candidate(best.candidate, noun)}: {candidate_figures(best, asked)}"
    if because := _why_no_simpler(best, explored, fastest, noun):
        reason += f"; {because}"
    runner_up = None
    if second is not None:
        runner_up = Decision(value=second, reason=_why_not(second, best, fastest, noun))
    return Decision(value=best, reason=reason), runner_up


def _is_alike(one: Candidate, other: Candidate) -> bool:
    return candidate_text(one) == candidate_text(other) and one.recompute == other.recompute


def describe_candidate(candidate: Candidate, noun: str) -> str:
    """Describe a candidate: ``fsdp over 8 GPUs, micro-batch 2 x 4, bf16, recompute full``.

    ``noun`` is what it is spread over: GPUs, or ranks of a CPU.
    """
    portions = f"micro-batch {candidate.micro_batch_size}"
    if candidate.accumulation > 1:
        portions += f" x {candidate.accumulation}"
    words = [candidate_name(candidate), portions, candidate.precision]
    if candidate.layout.ranks > 1:
        words[0] += f" over {plural(candidate.layout.ranks, noun)}"
    if candidate.recompute != "none":
        words.append(f"recompute {recompute_of(candidate)}")
    return ", ".join(words)


def candidate_figures(one: Forecast, asked: PlanRequest) -> str:
    """Describe the memory and speed of a candidate."""
    card = asked.hardware.card
    room = (
        f"{format_bytes(one.memory.total_bytes)} of {format_bytes(card.memory_bytes)} "
        f"per {card.noun}, {format_bytes(one.spare_bytes)} spare above the band"
    )
    return room if one.time is None else f"{room}, {samples_per_second(one)}"


def samples_per_second(one: Forecast) -> str:
    """Describe the speed of a candidate."""
    if one.time is not None and one.time.tokens_per_s is not None:
        return f"{one.time.tokens_per_s:,.0f} tokens/s"
    return f"{one.samples_per_s or 0.0:,.1f} samples/s"


def _why_no_simpler(best: Forecast, explored: Explored, fastest: float, noun: str) -> str:
    """Return why ddp, which is simpler than fsdp, was not chosen."""
    if best.candidate.strategy != "fsdp":
        return ""
    passed = next((one for one in explored.passed_over if one.name == "ddp"), None)
    if passed is not None and passed.needs_bytes is not None and passed.of_states:
        return f"ddp needs {format_bytes(passed.needs_bytes)} for its states alone"
    tried = [one for one in explored.forecasts if one.candidate.strategy == "ddp"]
    if not tried:
        return ""
    fitting = in_preference(one for one in tried if one.fits)
    if fitting:
        return _why_not(fitting[0], best, fastest, noun)
    nearest = max(tried, key=lambda one: one.spare_bytes)
    return f"ddp lacks {format_bytes(-nearest.spare_bytes)}"


def _why_not(other: Forecast, best: Forecast, fastest: float, noun: str) -> str:
    name = describe_candidate(other.candidate, noun)
    if not other.samples_per_s or not best.samples_per_s:
        return f"{name} is more complex"
    if other.samples_per_s * SAME_RATE >= fastest:
        return f"{name} is as fast, but more complex"
    if other.samples_per_s * SAME_RATE >= best.samples_per_s:
        return (
            f"{name} is {_decide_percent(1.0 - other.samples_per_s / fastest)} "
            "slower than the fastest"
        )
    return f"{name} is {_decide_percent(1.0 - other.samples_per_s / best.samples_per_s)} slower"


def _decide_percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share < 10 else f"{share:.0f} times"


def describe_offer(offer: Offer) -> str:
    """Describe what an offer trains: ``LoRA trains 6.82 M of 8.03 B parameters``."""
    if offer.trained_count is None or offer.parameter_count is None:
        return f"{offer.name} trains small matrices of rank {offer.rank}, not the weights"
    return (
        f"{offer.name} trains matrices of rank {offer.rank} with {offer.trained_count / 1e6:,.1f} M "
        f"parameters, not the {(offer.parameter_count - offer.trained_count) / 1e9:,.2f} B weights"
    )


def would_change(
    best: Forecast,
    explored: Explored,
    asked: PlanRequest,
    *,
    rates: Rates,
) -> Iterator[str]:
    """Yield what would change the choice, hardware first; each line is computed."""
    noun = asked.hardware.card.noun
    yield from _more_memory(best, explored, noun)
    yield from _less_memory(best, explored, noun)
    yield from _larger_steps(best, explored, asked, rates=rates)
    if best.time is not None and best.candidate.layout.ranks > 1:
        yield from _faster_links(best, explored, asked, rates=rates)


def _more_memory(best: Forecast, explored: Explored, noun: str) -> Iterator[str]:
    faster = [
        one
        for one in explored.forecasts
        if one.spare_bytes < 0
        and (one.samples_per_s or 0.0) > (best.samples_per_s or 0.0) * SAME_RATE
    ]
    if faster:
        nearest = max(faster, key=lambda one: one.spare_bytes)
        gain = _decide_percent((nearest.samples_per_s or 0.0) / (best.samples_per_s or 1.0) - 1.0)
        yield (
            f"with {format_bytes(-nearest.spare_bytes)} more per {noun}: "
            f"{describe_candidate(nearest.candidate, noun)}, {gain} faster"
        )
    needs = [one for one in explored.passed_over if one.of_states]
    if needs:
        least = min(needs, key=lambda one: one.needs_bytes or 0)
        yield f"{least.name} needs more than {format_bytes(least.needs_bytes or 0)} per {noun}"


def _less_memory(best: Forecast, explored: Explored, noun: str) -> Iterator[str]:
    smaller = [
        one
        for one in explored.forecasts
        if one.fits and one.memory.high_bytes < _LESS * best.memory.high_bytes
    ]
    border = format_bytes(best.memory.high_bytes)
    if not smaller:
        yield f"with less than {border} per {noun}, none of the evaluated configurations fits"
        return
    following = preferred(smaller)
    needed = format_bytes(following.memory.high_bytes)
    words = describe_candidate(following.candidate, noun)
    yield f"with less than {border} per {noun}: {words}, at most {needed}"


def _larger_steps(
    best: Forecast, explored: Explored, asked: PlanRequest, *, rates: Rates
) -> Iterator[str]:
    """Yield what a larger global batch would gain, if none was given."""
    is_open = asked.global_batch_size is None and asked.micro_batch_size is None
    size = best.candidate.micro_batch_size
    if not is_open or not best.samples_per_s or size < USUAL_MICRO_BATCH_SIZE:
        return
    found = best
    while size < _LARGEST_MICRO_BATCH:
        size *= 2
        larger = dataclasses.replace(best.candidate, micro_batch_size=size)
        if explored.traces.missing(larger):
            break  # a possible gain is not worth a trace
        one = forecast_candidate(larger, explored.traces, asked, rates=rates)
        if not one.fits or _decide_rate(one) < _decide_rate(found) * SAME_RATE:
            break
        found = one
    if found is not best:
        gain = _decide_percent(_decide_rate(found) / _decide_rate(best) - 1.0)
        batch = found.candidate.global_batch_size
        words = describe_candidate(found.candidate, asked.hardware.card.noun)
        yield f"with a global batch of {batch:,}: {words}, {gain} faster"


def _faster_links(
    best: Forecast, explored: Explored, asked: PlanRequest, *, rates: Rates
) -> Iterator[str]:
    hardware = dataclasses.replace(
        asked.hardware,
        within=_twice(asked.hardware.within),
        between=_twice(asked.hardware.between),
    )
    wished = dataclasses.replace(asked, hardware=hardware)
    faster = forecast_candidate(best.candidate, explored.traces, wished, rates=rates)
    gain = (faster.samples_per_s or 0.0) / (best.samples_per_s or 1.0) - 1.0
    if gain >= _WORTH_SAYING:
        yield f"with links twice as fast: {_decide_percent(gain)} faster"


def _twice(link: Link) -> Link:
    return dataclasses.replace(link, bytes_s=2 * link.bytes_s, latency_s=link.latency_s / 2)


def describe_passed_over(passed: Sequence[PassedOver]) -> list[str]:
    """Return one line per kind of reason why candidates were skipped, with its lowest amount."""
    by_reason: dict[str, list[PassedOver]] = {}
    for one in passed:
        by_reason.setdefault(_AMOUNT.sub("", one.why), []).append(one)
    lines = []
    for alike in by_reason.values():
        least = min(alike, key=lambda one: one.needs_bytes or 0)
        lines.append(f"{', '.join(_decide_names(alike))}: {least.why}")
    left_out = len(lines) - _MOST_REASONS
    if left_out > 0:
        lines[_MOST_REASONS:] = [f"{plural(left_out, 'more reason')}: see --json"]
    return lines


def _decide_names(passed: Sequence[PassedOver]) -> Iterator[str]:
    """Yield the names; hybrids that differ only in their number of shards share one name."""
    sizes: dict[str, list[int]] = {}  # shards of hybrids, by the rest of their names
    names: dict[str, str | None] = {}
    for one in passed:
        found = _HYBRID.fullmatch(one.name)
        if found is None:
            names[one.name] = None
            continue
        names["hybrid" + found[2]] = found[2]
        sizes.setdefault(found[2], []).append(int(found[1]))
    for name, rest in names.items():
        if rest is None:
            yield name
            continue
        least, most = min(sizes[rest]), max(sizes[rest])
        shards = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        yield f"hybrid of {shards} shards{rest}"
