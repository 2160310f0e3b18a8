"""A few real steps of a plan on this machine: what they took of memory and of time, as each rank saw it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster.errors import MusterError
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof import fresh_ranks

PROGRAM = "torchmuster.plan.probes.real_steps"
# What is alive in a step is the same from the second one on; the third is sure not to be special, nor is the fourth.
FOLLOWED = 4


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What each rank is told: the work, the way, and how many steps are timed."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    timed: int
    blocks: int | None = None  # so many of the model's repeated layers; None: all


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank saw."""

    rank: int
    device: str
    peaks_bytes: tuple[int, ...]  # of tensors on the device, in each of the first steps
    reserved_bytes: int | None  # by an accelerator's allocator, at most; None on the CPU
    step_s: tuple[float, ...]  # of the steps after them, which nothing holds up
    loss: float  # of one more micro-batch, the mean over what it counts

    @property
    def peak_bytes(self) -> int:
        """The most that is alive in a step once everything is there.

        The lesser of two steps: gloo's threads may have what they sent in hand for a moment too long.
        """
        return min(self.peaks_bytes[-2:])


def run(
    work: Work,
    candidate: Candidate,
    *,
    ranks: int,
    device: Literal["cpu", "gpu"] = "cpu",
    steps: int = 5,
    blocks: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[RankSteps]:
    """Take real steps with so many ranks of this machine; return what each of them saw, by rank.

    The first steps are followed for their memory, and ``steps`` more are timed. With ``blocks`` the model
    has so many repeated layers instead of all. A rank that fails ends all; what became of it is in the error.
    ``say`` hears that it goes on.
    """
    told = Steps(
        work=work,
        candidate=candidate,
        device="cpu" if device == "cpu" else "auto",
        timed=steps,
        blocks=blocks,
    )
    ran = fresh_ranks.run(
        PROGRAM,
        msgspec.json.encode(told).decode(),
        ranks=ranks,
        device=device,
        folder=str(Path(work.folder).absolute()),
        name="plan-steps",
        doing="real steps",
        say=say,
    )
    if len(ran.texts) == ranks and ran.trouble is None:
        return [msgspec.json.decode(ran.texts[rank], type=RankSteps) for rank in sorted(ran.texts)]
    if ran.trouble is None:
        raise MusterError(
            "the real steps did not end well",
            why=f"{len(ran.texts)} of {ranks} ranks told what they saw",
            fix="try again; the plan itself is not touched by it",
        )
    raise MusterError(
        "the real steps did not end well",
        why=fresh_ranks.in_words(ran.trouble),
        fix=ran.trouble.fix,
    )
