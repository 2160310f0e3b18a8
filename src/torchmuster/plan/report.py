"""Print a plan: choice and band first, at most 20 lines; ``--details`` and ``--json`` have the rest."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torchmuster.finding import render
from torchmuster.pages.columns import aligned_columns
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer, Forecast
from torchmuster.plan.hardware.described import describe_hardware
from torchmuster.redaction import harmless
from torchmuster.units import GiB, MiB, format_bytes, plural

_ROWS = 5  # of the table without --details
_AMOUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6))


def plan_text(
    answer: Answer, *, line: str, width: int = 100, colour: bool = False, details: bool = False
) -> str:
    """Return the report; ``line`` is the command that trains with the chosen candidate."""
    best, hardware = answer.chosen.value, answer.request.hardware
    parts = [
        harmless(f"chosen  {answer.chosen.reason}"),
        f"speed   {speed_text(best)}",
        f"for     {_question_text(answer)}",
        "",
        *_table(answer, None if details else _ROWS),
    ]
    for offer in answer.offers:
        parts += [f"offer   {offer.describe(hardware.card.noun)}", f"        {offer.flags}"]
    if details:
        parts += ["", *_details(answer)]
    if answer.findings:
        parts += ["", render(answer.findings, width=width, colour=colour)]
    hosts = -(-best.candidate.layout.ranks // hardware.cards_per_machine)
    on_hosts = f", on {hosts:,} machines" if hosts > 1 else ""
    return "\n".join([*parts, "", f"train with this plan{on_hosts}:", f"  {line}"])


def _question_text(answer: Answer) -> str:
    work, tokens = answer.request.work, answer.request.work.sequence_length
    parts = [
        str(work.model_name_or_path or work.build),
        f"{short_number(answer.model.parameter_count)} parameters",
    ]
    if tokens is not None:
        parts.append(f"{tokens:,} tokens per sample")
    if answer.request.global_batch_size is not None:
        parts.append(f"global batch {answer.request.global_batch_size:,}")
    return harmless(f"{', '.join(parts)}, on {describe_hardware(answer.request.hardware)}")


def speed_text(forecast: Forecast) -> str:
    """Return the speed with two digits and its band."""
    time = forecast.time
    if time is None:
        return "unknown for this device; measure it there: muster plan --verify"
    speed, unit = time.samples_per_s, "samples/s"
    if time.tokens_per_s is not None:
        speed, unit = time.tokens_per_s, "tokens/s"
    low, high = speed / estimate.TIME_BAND, speed * estimate.TIME_BAND
    return (
        f"rough: {short_number(speed)} {unit} (band {short_number(low)} to {short_number(high)}), "
        f"{seconds_text(time.step_s)} per step"
    )


def seconds_text(seconds: float) -> str:
    """Format the time of a step with two significant digits."""
    if seconds < 1:
        return f"{float(f'{seconds * 1000:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):,g} s"


def short_number(amount: float) -> str:
    """Format a number with two digits, or three for a count: ``12,000``, ``8.03 B``."""
    for unit, size in _AMOUNTS:
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{float(f'{amount:.2g}'):,g}"


def _table(answer: Answer, most: int | None) -> Iterator[str]:
    largest = max(row.memory.total_bytes for row in answer.table)
    size, unit = (GiB, "GiB") if largest >= GiB else (MiB, "MiB")
    rows = [
        ("strategy", "recompute", "batch", "tensors", f"total {unit}", "at most", "fits", "step")
    ]
    for row in answer.table[:most]:
        candidate, memory = row.candidate, row.memory
        amounts = (memory.tensor_bytes, memory.total_bytes, memory.high_bytes)
        tensors, total, high = (f"{amount / size:.1f}" for amount in amounts)
        fits = "yes" if row.fits else "tight"
        if not row.probably_fits:
            fits = f"-{row.missing_bytes / size:,.1f}"
        step = "-" if row.time is None else seconds_text(row.time.step_s)
        batch, recompute = candidate.batch_text, candidate.recompute_text
        rows.append((candidate.name, recompute, batch, tensors, total, high, fits, step))
    yield from aligned_columns(rows)
    if most is not None and len(answer.table) > most:
        yield f"{plural(len(answer.table) - most, 'more row')}: --details"


def _details(answer: Answer) -> Iterator[str]:
    best = answer.chosen.value
    yield f"memory  peak in: {best.memory.peak_at}"
    for name, size, source in memory_parts(best):
        yield f"        {name:<12} {format_bytes(size):>10}  {source}"
    if best.memory.host_bytes:
        yield f"        offload keeps {format_bytes(best.memory.host_bytes)} in host memory"
    if best.time is not None:
        waiting = round(100 * best.time.waiting_share)
        yield f"speed   {waiting} % of a step is spent waiting for other ranks"
    for name, why in answer.skipped.items():
        yield f"skipped {name}: {why}"
    hardware = answer.request.hardware
    yield f"source  {hardware.card.name}: {hardware.card.source or 'unknown source'}"
    for sentence in (answer.request.precision.reason, *hardware.assumed):
        yield f"source  {sentence}"
    yield f"source  memory: {answer.traces} traces of a few blocks, extended to the whole model"


def memory_parts(forecast: Forecast) -> Iterator[tuple[str, int, str]]:
    """Yield the parts of a GPU's memory: name, bytes, source."""
    memory = forecast.memory
    for name, size in memory.by_category.items():
        if size > 0:
            yield name, size, "traced tensors"
    outside = sum(term.size_bytes for term in memory.outside)
    cached = memory.total_bytes - memory.tensor_bytes - outside
    if cached > 0:
        yield "cached", cached, f"PyTorch's allocator reserves {estimate.RESERVED:g} x tensors"
    for term in memory.outside:
        yield term.name, term.size_bytes, term.source


def plan_json(answer: Answer, *, line: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return everything as a document for JSON."""
    hardware, best = answer.request.hardware, answer.chosen.value
    offers = []
    for offer in answer.offers:
        offers.append({
            "name": offer.name,
            "flags": offer.flags,
            "settings": dict(offer.settings),
            "trained_parameters": offer.trained_count,
            "forecast": _forecast_json(offer.forecast),
        })  # fmt: skip
    return {
        "fits": best.fits,
        "chosen": _forecast_json(best),
        "reason": answer.chosen.reason,
        "candidates": [_forecast_json(row) for row in answer.table],
        "skipped": dict(answer.skipped),
        "offers": offers,
        "findings": [finding.as_json() for finding in answer.findings],
        "parameters": answer.model.parameter_count,
        "hardware": {
            "name": describe_hardware(hardware),
            "card_bytes": hardware.card.memory_bytes,
            "source": hardware.card.source,
            "assumed": list(hardware.assumed),
        },
        "precision": answer.request.precision.reason,
        "settings": dict(settings),
        "command": line,
    }


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "name": forecast.candidate.name,
        "candidate": dataclasses.asdict(forecast.candidate),
        "fits": forecast.fits,
        "missing_bytes": max(forecast.missing_bytes, 0),
        "memory": dataclasses.asdict(forecast.memory),
        "time": None if forecast.time is None else dataclasses.asdict(forecast.time),
        "time_band": [1 / estimate.TIME_BAND, estimate.TIME_BAND],
    }
