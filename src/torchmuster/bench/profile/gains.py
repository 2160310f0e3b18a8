"""How much faster a training would be if a part of its step were shorter.

A step is as long as its slowest rank's own work, then the transfer for which all wait. So what one rank saves helps only
until another is the slowest, and the gain is that of the whole step, not of the part.
"""

import math
from collections.abc import Callable, Sequence

from torchmuster.bench.profile.recording_words import RankFacts, Step
from torchmuster.bench.profile.usual_steps import (
    RanksStep,
    mean_s,
    own_s,
    step_s,
    transfer_s,
    waited_s,
)

_ROOM = 1.25  # loader workers more than would just do
_MOST_WORKERS = 16
_MESSAGES = 6  # that a backward's gradients are sent in, if they are to overlap
_SMALLEST_MESSAGE_MIB = 1


def gain(
    steps: Sequence[RanksStep],
    saved_s: Callable[[int, Step], float],
    *,
    transfer_saved_s: float = 0.0,
) -> float:
    """Return how many times as many steps per second there are if each rank's own work gets so much shorter."""
    before_s = after_s = 0.0
    for step in steps:
        took_s = max(one.took_s for one in step.values())
        own = {rank: one.took_s - waited_s(one) for rank, one in step.items()}
        left = max(own[rank] - saved_s(rank, one) for rank, one in step.items())
        before_s += took_s
        after_s += max(took_s - (max(own.values()) - left) - transfer_saved_s, 1e-9)
    return before_s / after_s if before_s else 1.0


def of_phase(steps: Sequence[RanksStep], phase: str, *, left: float = 0.0) -> float:
    """Return the gain if a phase took only a part of its time on every rank."""
    return gain(steps, lambda _, one: own_s(one)[phase] * (1 - left))


def workers_needed(steps: Sequence[RanksStep], workers: int) -> int:
    """Return how many loader workers keep up with the rest of the step."""
    whole_s, data_s = step_s(steps), mean_s(steps, "data")
    # A loader without workers makes a batch while all wait; one with workers makes as many as it has in a step.
    batch_s = data_s if workers == 0 else workers * whole_s
    rest_s = max(whole_s - data_s, 1e-9)
    return min(max(math.ceil(_ROOM * batch_s / rest_s), workers + 1, 2), _MOST_WORKERS)


def of_workers(steps: Sequence[RanksStep], before: int, after: int) -> float:
    """Return the gain of more loader workers, if there are cores for them."""

    def saved_s(_: int, one: Step) -> float:
        batch_s = one.data_s if before == 0 else before * one.took_s
        still_s = max(batch_s / after - (one.took_s - one.data_s), 0.0)
        return max(one.data_s - still_s, 0.0)

    return gain(steps, saved_s)


def message_mib(gradient_bytes: int) -> int:
    """Return a size of messages in which gradients can be sent while others are computed."""
    return max(round(gradient_bytes / _MESSAGES / 2**20), _SMALLEST_MESSAGE_MIB)


def of_overlap(
    steps: Sequence[RanksStep], *, gradient_bytes: int, message_bytes: int
) -> tuple[float, float]:
    """Return the gain of sending gradients while others are computed, and what part of the transfer that hides.

    The last message cannot overlap with anything, and the first can begin only when its gradients are there.
    """
    exposed_s, backward_s = transfer_s(steps), mean_s(steps, "backward")
    messages = max(math.ceil(gradient_bytes / message_bytes), 1)
    left_s = max(exposed_s / messages, exposed_s + backward_s / messages - backward_s)
    hidden_s = max(exposed_s - left_s, 0.0)
    part = hidden_s / exposed_s if exposed_s else 0.0
    return gain(steps, lambda _, __: 0.0, transfer_saved_s=hidden_s), part


def of_batch(steps: Sequence[RanksStep], times: int) -> float:
    """Return the least gain of a larger batch: if only sending and the optimizer took no longer with it."""
    whole_s = step_s(steps)
    growing_s = max(whole_s - transfer_s(steps) - mean_s(steps, "optimizer"), 0.0)
    return times * whole_s / (whole_s + (times - 1) * growing_s)


def messages_of(facts: RankFacts) -> int | None:
    """Return in how many messages a rank's gradients are sent, as DDP's cap has it."""
    if facts.spread != "ddp" or not facts.bucket_bytes or not facts.gradient_bytes:
        return None
    return max(math.ceil(facts.gradient_bytes / facts.bucket_bytes), 1)
