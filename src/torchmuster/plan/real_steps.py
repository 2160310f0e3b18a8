"""Run a plan's real training steps on fresh ranks of this machine: to verify it, to find the batch."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmuster.errors import MusterError, OutOfMemory
from torchmuster.finding import Finding, Status
from torchmuster.launch import local_ranks
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer, Forecast
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.units import format_bytes

PROGRAM = "torchmuster.plan.probes.real_steps"
# The optimizer's states exist after the first step, and ddp rebuilds its buckets in the second.
FOLLOWED = 4
TIMED = 5
MEMORY_BAND = 0.05  # of tensors: more than this above the plan is a failure
LARGEST_SIZE = 2**20  # where nothing limits a micro-batch
FIND_SIZE = "find the micro-batch by trials: muster plan --find-batch-size"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RealSteps:
    """The request to each rank: the work, the candidate, and how many steps to time."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    timed: int


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured; a rank that ran out of memory has measured nothing."""

    rank: int
    ran_out: str | None = None  # the message, if memory ran out
    peaks_bytes: tuple[int, ...] = ()  # of tensors on the device, in each of the first steps
    reserved_bytes: int = 0  # peak of an accelerator's allocator; 0 on the CPU, which has none
    step_s: tuple[float, ...] = ()  # of the steps after them, without memory tracking

    @property
    def peak_bytes(self) -> int:
        """The peak of a step in the steady state.

        The lower of two steps: gloo's threads may hold their send buffers a moment too long.
        """
        return min(self.peaks_bytes[-2:])


def run_real_steps(
    work: Work,
    candidate: Candidate,
    *,
    device: Literal["cpu", "gpu"],
    steps: int,
    say: Say = lambda text: None,
) -> list[RankSteps]:
    """Run real steps on this machine: memory is tracked in the first ones, ``steps`` more are timed.

    Raises OutOfMemory if a rank's device has too little memory, and MusterError with the cause of
    any other failure.
    """
    request = RealSteps(
        work=work,
        candidate=candidate,
        device="cpu" if device == "cpu" else "auto",
        timed=steps,
    )
    doing = f"real steps with micro-batches of {candidate.micro_batch_size}"
    output = local_ranks.run_local_ranks(
        PROGRAM,
        msgspec.json.encode(request).decode(),
        ranks=candidate.layout.ranks,
        device=device,
        folder=str(Path(work.folder).absolute()),
        name="plan-steps",
        doing=doing,
        say=say,
    )
    measured = []
    for _, text in sorted(output.texts.items()):
        measured.append(msgspec.json.decode(text, type=RankSteps))
    for rank in measured:
        if rank.ran_out is not None:
            raise OutOfMemory(
                f"{doing} ran out of memory on rank {rank.rank}", why=rank.ran_out, fix=FIND_SIZE
            )
    if output.trouble is not None:
        why = local_ranks.describe_failure(output.trouble)
        raise MusterError("the real steps failed", why=why, fix=output.trouble.fix)
    return measured


# ---- predicted against measured


def verify_plan(answer: Answer, *, say: Say) -> Finding:
    """Compare the chosen candidate of a plan for this machine with real steps."""
    best, request = answer.chosen.value, answer.request
    device: Literal["cpu", "gpu"] = "cpu" if request.hardware.card.kind == "cpu" else "gpu"
    ranks = run_real_steps(request.work, best.candidate, device=device, steps=TIMED, say=say)
    return compare_steps(best, request.hardware, ranks)


def compare_steps(planned: Forecast, hardware: Hardware, measured: Sequence[RankSteps]) -> Finding:
    """Return predicted and measured figures: much more memory than planned is a failure."""
    tensors, predicted = max(rank.peak_bytes for rank in measured), planned.memory.tensor_bytes
    figures = [_compared("tensors", predicted, tensors, format_bytes)]
    is_larger = tensors > predicted * (1 + MEMORY_BAND)
    reserved = max(rank.reserved_bytes for rank in measured)
    if reserved:
        expected, _, high = estimate.device_bytes(predicted, hardware)
        figures.append(_compared("reserved by the allocator", expected, reserved, format_bytes))
        is_larger = is_larger or reserved > high
    # A step takes as long as on its slowest rank.
    slowest = [max(times) for times in zip(*(rank.step_s for rank in measured), strict=True)]
    step_s = statistics.median(slowest)
    status, fix = Status.OK, ""
    if planned.time is None:
        figures.append(f"step: measured {estimate.seconds_text(step_s)}, not predicted")
    else:
        figures.append(_compared("step", planned.time.step_s, step_s, estimate.seconds_text))
        if step_s > planned.time.step_s * estimate.TIME_BAND:
            status, fix = Status.WARNING, "see what a step waits for: muster profile"
    if is_larger:  # what fits according to the plan may run out of memory
        status, fix = Status.FAILURE, FIND_SIZE
    return Finding(name="plan-verified", status=status, what="; ".join(figures), fix=fix)


def _compared(figure: str, predicted: float, measured: float, text_of: Callable[[Any], str]) -> str:
    percent = (measured / predicted - 1) * 100
    return (
        f"{figure}: predicted {text_of(predicted)}, measured {text_of(measured)} ({percent:+.1f} %)"
    )


# ---- the largest micro-batch


def find_batch_size(
    work: Work,
    candidate: Candidate,
    *,
    device: Literal["cpu", "gpu"],
    samples: int | None,
    say: Say = lambda text: None,
) -> Finding:
    """Find the largest micro-batch of a candidate on this machine, each size on fresh ranks.

    Doubles the plan's own size while it fits, or halves it until it does. ``samples`` is the number
    of samples of a rank in a step, if it is fixed; accumulation then follows from the size.
    """
    tried: list[str] = []

    def fits(size: int) -> bool:
        sized = with_size(candidate, size, samples=samples)
        try:
            ranks = run_real_steps(work, sized, device=device, steps=0, say=say)
        except OutOfMemory as error:
            tried.append(error.what)
            return False
        used = max(rank.reserved_bytes or rank.peak_bytes for rank in ranks)
        tried.append(f"micro-batch {size} fits: a rank uses {format_bytes(used)}")
        return True

    size = largest_batch(fits, start=candidate.micro_batch_size, most=samples or LARGEST_SIZE)
    evidence = "\n".join(tried)
    if size is None:
        return Finding(
            name="batch-size",
            status=Status.FAILURE,
            what="not even a micro-batch of 1 fits",
            fix="use more GPUs, recomputation, or shorter samples",
            evidence=evidence,
        )
    fix = f"--set train.micro_batch_size={size}"
    if samples is None:
        whole = with_size(candidate, size, samples=None).global_batch_size
        fix += f" --set train.global_batch_size={whole}"
    return Finding(
        name="batch-size",
        status=Status.OK,
        what=f"the largest micro-batch that fits is {size}; the plan chose "
        f"{candidate.micro_batch_size}",
        fix=fix,
        evidence=evidence,
    )


def largest_batch(fits: Callable[[int], bool], *, start: int, most: int) -> int | None:
    """Return the largest size that fits of ``start``, doubled and halved; None: not even 1."""
    size = min(start, most)
    if not fits(size):
        while size > 1:
            size //= 2
            if fits(size):
                return size
        return None
    while size < most:
        larger = min(2 * size, most)
        if not fits(larger):
            break
        size = larger
    return size


def with_size(candidate: Candidate, size: int, *, samples: int | None) -> Candidate:
    """Return the candidate with another micro-batch, and accumulation to match its samples."""
    accumulation = candidate.accumulation if samples is None else math.ceil(samples / size)
    return replace(candidate, micro_batch_size=size, accumulation=accumulation)
