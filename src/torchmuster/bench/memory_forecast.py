"""What ``muster plan`` would say of the same steps: each is imagined as a whole, on tensors without memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.plan.record import Record, Request
from torchmuster.plan.tracing.tracer import Found, Refused

# A deeper model is imagined only where it says most: with nothing and with everything computed again.
_MOST_BLOCKS = 16


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Peaks of some ways; why there are none, where there are none."""

    planned_bytes: dict[Recompute, int]
    not_planned: str = ""


def forecast(
    work: Work,
    candidate: Candidate,
    ways: Sequence[Recompute],
    *,
    blocks: int,
    kernels: Literal["cpu", "cuda"],
    look: Callable[[Sequence[Request]], Sequence[Found]],
) -> Forecast:
    """Forecast the peaks of ways to compute again; ``look`` traces."""
    asked = [one for one in ways if blocks <= _MOST_BLOCKS or one in ("none", "full")]
    requests = [
        Request(work=work, candidate=replace(candidate, recompute=way), kernels=kernels)
        for way in asked
    ]
    found = look(requests)
    refused = next((one for one in found if isinstance(one, Refused)), None)
    if refused is not None:
        return Forecast(planned_bytes={}, not_planned=refused.what)
    return Forecast(
        planned_bytes={
            way: one.peak_bytes
            for way, one in zip(asked, found, strict=True)
            if isinstance(one, Record)
        }
    )
