"""Print a plan: choice and band first, at most 20 lines; ``--details`` and ``--json`` have the rest."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from torchmuster.finding import render
from torchmuster.pages.columns import aligned_columns
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer, Forecast
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
        f"{short_number(answer.parameter_count)} parameters",
    ]
    if tokens is not None:
        parts.append(f"{tokens:,} tokens per sample")
    if answer.request.global_batch_size is not None:
        parts.append(f"global batch {answer.request.global_batch_size:,}")
    return harmless(f"{', '.join(parts)}, on {answer.request.hardware.describe()}")


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
        f"{estimate.seconds_text(time.step_s)} per step"
    )


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
        step = "-" if row.time is None else estimate.seconds_text(row.time.step_s)
        batch, recompute = candidate.batch_text, candidate.recompute_text
        rows.append((candidate.name, recompute, batch, tensors, total, high, fits, step))
    yield from aligned_columns(rows)
    if most is not None and len(answer.table) > most:
        yield f"{plural(len(answer.table) - most, 'more row')}: --details"


def _details(answer: Answer) -> Iterator[str]:
    best, hardware = answer.chosen.value, answer.request.hardware
    memory = best.memory
    yield f"memory  peak in: {memory.peak_at}"
    outside = sum(term.size_bytes for term in memory.outside)
    cached = memory.total_bytes - memory.tensor_bytes - outside
    parts = [(name, size, "traced tensors") for name, size in memory.by_category.items()]
    parts.append(
        ("cached", cached, f"PyTorch's allocator reserves {estimate.RESERVED:g} x tensors")
    )
    parts += [(term.name, term.size_bytes, term.source) for term in memory.outside]
    parts.append(("offloaded", memory.host_bytes, "in the memory of the host, not of the GPU"))
    for name, size, source in parts:
        if size > 0:
            yield f"        {name:<12} {format_bytes(size):>10}  {source}"
    if best.time is not None:
        waiting = round(100 * best.time.waiting_share)
        yield f"speed   {waiting} % of a step is spent waiting for other ranks"
    for name, why in answer.skipped.items():
        yield f"skipped {name}: {why}"
    yield f"source  {hardware.card.name}: {hardware.card.source or 'unknown source'}"
    for sentence in (answer.request.precision.reason, *hardware.assumed):
        yield f"source  {sentence}"
    yield "source  memory: traces of a few blocks, extended to the whole model"


def plan_json(answer: Answer, *, line: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return everything as a document for JSON: the fields of the answer, and what to run."""
    document: dict[str, Any] = msgspec.to_builtins(answer)
    fits = answer.chosen.value.fits
    return {"fits": fits, **document, "settings": dict(settings), "command": line}
