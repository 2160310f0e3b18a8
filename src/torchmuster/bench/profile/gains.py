"""The expected gain if a part of the step were shorter.

A step takes the work of its slowest rank plus the transfer for which all wait. So a saving on one
rank helps only until another rank is the slowest, and the gain applies to the whole step, not
to the part.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from torchmuster.bench.profile.recording import RankFacts, RecordedStep

RanksStep = Mapping[int, RecordedStep]  # one step, by rank

PHASES = ("data", "forward", "backward", "optimizer", "save", "reads", "other")
_UNUSUAL_FROM = 1.5  # times the median step


def usual_steps(ranks: Sequence[RankFacts]) -> list[RanksStep]:
    """Return the steps to evaluate: without the profiler if possible."""
    by_rank = {one.rank: {step.number: step for step in one.steps} for one in ranks}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    found = [{rank: steps[at] for rank, steps in by_rank.items()} for at in sorted(common)]
    plain = [step for step in found if not any(one.profiled for one in step.values())] or found
    # Steps delayed from outside are left out; saves are not from outside.
    lengths = [max(one.took_s - one.save_s for one in step.values()) for step in plain]
    longest = _UNUSUAL_FROM * statistics.median(lengths) if lengths else 0.0
    return [step for step, length in zip(plain, lengths, strict=True) if length <= longest]


def waited_s(step: RecordedStep) -> float:
    """Return how long a rank waited for communication without overlap."""
    return step.waiting_s + step.communication_s


def own_s(step: RecordedStep) -> dict[str, float]:
    """Return the time of a rank by phase, without waiting for other ranks."""
    named: dict[str, float] = {phase: getattr(step, f"{phase}_s") for phase in PHASES}
    named["backward"] -= step.waiting_s
    return named


def mean_s(steps: Sequence[RanksStep], phase: str) -> float:
    """Return the seconds of a phase, averaged over steps and ranks."""
    return statistics.fmean(own_s(one)[phase] for step in steps for one in step.values())


def usual_step_s(steps: Sequence[RanksStep]) -> float:
    """Return the step time: the mean over the steps, of the slowest rank."""
    return statistics.fmean(max(one.took_s for one in step.values()) for step in steps)


def transfer_s(steps: Sequence[RanksStep]) -> float:
    """Return how long even the last rank waits per step: the time of the transfer itself."""
    if not steps or len(steps[0]) < 2:
        return 0.0
    return statistics.fmean(min(waited_s(one) for one in step.values()) for step in steps)


_ROOM = 1.25  # headroom for loader workers
_MOST_WORKERS = 16
_MESSAGES = 6  # per backward, so that they overlap
_SMALLEST_MESSAGE_MIB = 1


def gain(
    steps: Sequence[RanksStep],
    saved_s: Callable[[int, RecordedStep], float],
    *,
    transfer_saved_s: float = 0.0,
) -> float:
    """Return the gain in steps/s if each rank's own work gets shorter by these seconds."""
    before_s = after_s = 0.0
    for step in steps:
        took_s = max(one.took_s for one in step.values())
        own = {rank: one.took_s - waited_s(one) for rank, one in step.items()}
        left = max(own[rank] - saved_s(rank, one) for rank, one in step.items())
        before_s += took_s
        after_s += max(took_s - (max(own.values()) - left) - transfer_saved_s, 1e-9)
    return before_s / after_s if before_s else 1.0


def gain_of_phase(steps: Sequence[RanksStep], phase: str, *, left: float = 0.0) -> float:
    """Return the gain if a phase took only a part of its time on every rank."""
    return gain(steps, lambda _, one: own_s(one)[phase] * (1 - left))


def workers_needed(steps: Sequence[RanksStep], workers: int) -> int:
    """Return how many loader workers are needed to hide data loading."""
    whole_s, data_s = usual_step_s(steps), mean_s(steps, "data")
    # Without workers, the training waits for each batch; workers load batches in parallel with a
    # step.
    batch_s = data_s if workers == 0 else workers * whole_s
    rest_s = max(whole_s - data_s, 1e-9)
    return min(max(math.ceil(_ROOM * batch_s / rest_s), workers + 1, 2), _MOST_WORKERS)


def gain_of_workers(steps: Sequence[RanksStep], before: int, after: int) -> float:
    """Return the gain of more loader workers, if there are cores for them."""

    def saved_s(_: int, one: RecordedStep) -> float:
        batch_s = one.data_s if before == 0 else before * one.took_s
        still_s = max(batch_s / after - (one.took_s - one.data_s), 0.0)
        return max(one.data_s - still_s, 0.0)

    return gain(steps, saved_s)


def message_mib(gradient_bytes: int) -> int:
    """Return a message size that lets gradient transfers overlap with the backward."""
    return max(round(gradient_bytes / _MESSAGES / 2**20), _SMALLEST_MESSAGE_MIB)


def gain_of_overlap(
    steps: Sequence[RanksStep], *, gradient_bytes: int, message_bytes: int
) -> tuple[float, float]:
    """Return the gain of overlapping gradient transfers, and the hidden share of the transfer.

    The last message cannot overlap, and the first can start only when its gradients are ready.
    """
    exposed_s, backward_s = transfer_s(steps), mean_s(steps, "backward")
    messages = max(math.ceil(gradient_bytes / message_bytes), 1)
    left_s = max(exposed_s / messages, exposed_s + backward_s / messages - backward_s)
    hidden_s = max(exposed_s - left_s, 0.0)
    part = hidden_s / exposed_s if exposed_s else 0.0
    return gain(steps, lambda _, __: 0.0, transfer_saved_s=hidden_s), part


def gain_of_batch(steps: Sequence[RanksStep], times: int) -> float:
    """Return the minimum gain of a larger batch: only communication and optimizer stay constant."""
    whole_s = usual_step_s(steps)
    growing_s = max(whole_s - transfer_s(steps) - mean_s(steps, "optimizer"), 0.0)
    return times * whole_s / (whole_s + (times - 1) * growing_s)


def messages_of(facts: RankFacts) -> int | None:
    """Return the number of gradient messages of a rank, given DDP's bucket size."""
    if facts.spread != "ddp" or not facts.bucket_bytes or not facts.gradient_bytes:
        return None
    return max(math.ceil(facts.gradient_bytes / facts.bucket_bytes), 1)
