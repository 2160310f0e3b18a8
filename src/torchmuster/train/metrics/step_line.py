"""What a run says of itself from time to time: one record, one line for people, one verdict."""

from dataclasses import dataclass
from typing import Any

from torchmuster.units import format_bytes

# From these shares of the time on, something is worth a word.
_MUCH_DATA = 0.2
_MUCH_COMMUNICATION = 0.3
_MUCH_CHECKPOINT = 0.1
# Ranks whose waiting differs by this share of the time wait for one among them.
_MUCH_WAITING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What happened since the last record, over all ranks. Shares are of the time, between 0 and 1."""

    step: int  # optimiser steps so far
    epoch: int
    loss: (
        float | None
    )  # the mean over all that was counted since the last record; None: nothing was
    learning_rate: float
    gradient_norm: float | None  # of the last step, before clipping; None where clipping is off
    samples: int  # since the last record
    samples_per_s: float
    tokens_per_s: float | None  # what the loss counted, where it counts
    step_s: float
    data_share: float
    compute_share: float
    communication_share: float | None  # not hidden behind computing; None where not measured
    checkpoint_share: float
    evaluation_share: float
    skipped_steps: int  # since the last record
    memory_peak_bytes: int  # of the rank that used most, since the start
    verdict: str = ""
    flop_s: float | None = None  # counted, of all ranks together; None where not counted
    mfu: float | None = None  # of the devices' highest rate; None where that is not known
    loss_scale: float | None = None  # what fp16 losses are multiplied by; None where they are not

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON types."""
        return {name: getattr(self, name) for name in self.__slots__}


def render_step_line(record: StepRecord, *, last_step: int | None = None) -> str:
    """Return the record as one line."""
    of = f"/{last_step}" if last_step is not None else ""
    parts = [
        f"step {record.step}{of}",
        f"epoch {record.epoch}",
        "loss -" if record.loss is None else f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.3g}",
    ]
    if record.gradient_norm is not None:
        parts.append(f"norm {record.gradient_norm:.3g}")
    parts.append(f"{_amount(record.samples_per_s)} samples/s")
    if record.tokens_per_s is not None:
        parts.append(f"{_amount(record.tokens_per_s)} tokens/s")
    if record.flop_s is not None:
        parts.append(_step_line_rate(record.flop_s, record.mfu))
    parts.append(_shares(record))
    parts.append(format_bytes(record.memory_peak_bytes))
    if record.skipped_steps:
        parts.append(f"{record.skipped_steps} skipped")
    if record.verdict:
        parts.append(record.verdict)
    return " | ".join(parts)


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _step_line_rate(flop_s: float, mfu: float | None) -> str:
    size, name = (1e12, "TFLOP/s") if flop_s >= 1e11 else (1e9, "GFLOP/s")
    rate = flop_s / size
    text = f"{rate:,.0f} {name}" if rate >= 100 else f"{rate:.3g} {name}"
    if mfu is None:
        return text
    # Nothing computes faster than it can: then one of the two figures is wrong, and the share says nothing.
    if mfu > 1.0:
        return f"{text} (error: {mfu * 100:.0f} % of the highest rate, so that rate or the count is wrong)"
    return f"{text} (MFU {mfu * 100:.0f} %)"


def _shares(record: StepRecord) -> str:
    communication = record.communication_share
    text = f"data {record.data_share:.0%} compute {record.compute_share:.0%} communication "
    text += "not measured" if communication is None else f"{communication:.0%}"
    text += f" checkpoint {record.checkpoint_share:.0%}"
    if record.evaluation_share:
        text += f" evaluation {record.evaluation_share:.0%}"
    return text.replace("%", " %")


def dominant_cost(
    *,
    data_shares: list[float],
    communication_shares: list[float] | None,
    checkpoint_share: float,
    data_fix: str,
) -> str:
    """Name what dominates, if anything does, and what to try.

    Shares of data and communication are those of each rank; ``data_fix`` is what may make reading faster.
    """
    worst = max(range(len(data_shares)), key=data_shares.__getitem__)
    share = data_shares[worst]
    slowest, waited = _waited_for(data_shares, communication_shares)
    if share >= max(_MUCH_DATA, waited):
        # With one slow reader among them, the other ranks wait for it in the gradients' average.
        alone = share - min(data_shares) >= _MUCH_WAITING
        who = f"rank {worst} waits" if alone else "waits"
        return f"{who} for data {share * 100:.0f} % of the time: {data_fix}"
    if waited >= _MUCH_WAITING:
        return f"the others wait for rank {slowest}"
    if communication_shares is not None:
        waiting = sum(communication_shares) / len(communication_shares)
        if waiting >= _MUCH_COMMUNICATION:
            return (
                f"waits for communication {waiting * 100:.0f} % of the time: "
                "larger micro-batches or more accumulation"
            )
    if checkpoint_share >= _MUCH_CHECKPOINT:
        return f"saves {checkpoint_share * 100:.0f} % of the time: save less often"
    return ""


def _waited_for(
    data_shares: list[float], communication_shares: list[float] | None
) -> tuple[int, float]:
    """Return the slowest rank, and the share of the time that another waits for what is not its reading."""
    if communication_shares is None:
        return 0, 0.0
    # The slowest rank is the one that need not wait. What it reads longer than another explains that one's waiting.
    slowest = min(range(len(communication_shares)), key=communication_shares.__getitem__)
    idle = [data + waits for data, waits in zip(data_shares, communication_shares, strict=True)]
    return slowest, max(idle) - idle[slowest]
