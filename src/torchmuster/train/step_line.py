"""The periodic report of a run: one record, its step line, and the dominant bottleneck."""

from dataclasses import dataclass
from typing import Any

from torchmuster.units import format_bytes

WIDTH = 100  # characters of a step line
SHOWN_SHARE = 0.01
# Advise on shares of the time from these thresholds on.
_MUCH_DATA = 0.2
_MUCH_COMMUNICATION = 0.3
_MUCH_CHECKPOINT = 0.1
# If ranks' waiting times differ by this share, they wait for a straggler.
_MUCH_WAITING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Metrics since the last record, over all ranks. Shares are fractions of the time, 0 to 1."""

    step: int  # optimizer steps so far
    epoch: int
    loss: float | None  # the mean since the last record; None: nothing was counted
    learning_rate: float
    gradient_norm: float | None  # of the last step, before clipping; None where clipping is off
    samples: int  # since the last record
    samples_per_s: float
    tokens_per_s: float | None  # the loss's count, if it has one
    step_s: float
    data_share: float
    compute_share: float
    communication_share: float | None  # not overlapped with compute; None if not measured
    checkpoint_share: float
    evaluation_share: float
    skipped_steps: int  # since the last record
    memory_peak_bytes: int  # of the rank with the highest peak, since the start
    verdict: str = ""
    flop_s: float | None = None  # of forward and backward, over all ranks; None if unknown
    mfu: float | None = None  # fraction of the devices' peak rate; None if unknown
    loss_scale: float | None = None  # for fp16; None otherwise

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON types."""
        return {name: getattr(self, name) for name in self.__slots__}


def render_step_line(
    record: StepRecord, *, last_step: int | None = None, saved_step: int | None = None
) -> str:
    """Return the record as one line of at most 100 characters; what is last in it gives way.

    ``saved_step`` is the step of a checkpoint that was written since the last line.
    """
    progress = f"step {record.step}"
    if last_step is not None:
        progress += f"/{last_step}"
    loss = "loss -"
    if record.loss is not None:
        loss = f"loss {record.loss:.4f}"
    parts = [progress, f"epoch {record.epoch}", loss, f"lr {record.learning_rate:.3g}"]
    if record.skipped_steps:
        parts.append(f"{record.skipped_steps} skipped")
    if saved_step is not None:
        parts.append(f"saved {saved_step}")
    if record.tokens_per_s is None:
        parts.append(f"{_amount(record.samples_per_s)} samples/s")
    else:
        parts.append(f"{_amount(record.tokens_per_s)} tokens/s")
    if record.gradient_norm is not None:
        parts.append(f"norm {record.gradient_norm:.3g}")
    if record.mfu is not None:
        parts.append(_utilization(record.mfu))
    parts.append(format_bytes(record.memory_peak_bytes))
    parts += _waits(record)
    while len(" | ".join(parts)) > WIDTH:
        parts.pop()
    return " | ".join(parts)


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _utilization(mfu: float) -> str:
    if mfu > 1.0:  # impossible: the peak rate or the FLOPs are wrong
        return f"MFU {mfu * 100:.0f} % (wrong)"
    return f"MFU {mfu * 100:.0f} %"


def _waits(record: StepRecord) -> list[str]:
    """Return the shares of the time that were not compute, the largest first."""
    shares = {
        "data": record.data_share,
        "communication": record.communication_share or 0.0,
        "saving": record.checkpoint_share,
        "evaluation": record.evaluation_share,
    }
    names = sorted(shares, key=lambda name: -shares[name])
    return [f"{name} {shares[name] * 100:.0f} %" for name in names if shares[name] >= SHOWN_SHARE]


def dominant_cost(
    *,
    data_shares: list[float],
    communication_shares: list[float] | None,
    checkpoint_share: float,
    data_fix: str,
) -> str:
    """Return the dominant bottleneck, if any, and a fix.

    Shares of data and communication are per rank; ``data_fix`` is the suggested fix for slow data.
    """
    worst = max(range(len(data_shares)), key=data_shares.__getitem__)
    share = data_shares[worst]
    slowest, waited = _waited_for(data_shares, communication_shares)
    if share >= max(_MUCH_DATA, waited):
        # If one rank reads slowly, the others wait for it in the gradient all-reduce.
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
        return f"saves checkpoints {checkpoint_share * 100:.0f} % of the time: save less often"
    return ""


def _waited_for(
    data_shares: list[float], communication_shares: list[float] | None
) -> tuple[int, float]:
    """Return the slowest rank, and the share of time others wait for it beyond its data loading."""
    if communication_shares is None:
        return 0, 0.0
    # The slowest rank waits least. Its extra data time explains part of the others' waiting.
    slowest = min(range(len(communication_shares)), key=communication_shares.__getitem__)
    idle = [data + waits for data, waits in zip(data_shares, communication_shares, strict=True)]
    return slowest, max(idle) - idle[slowest]
