"""A plan held against a few real steps on this machine: predicted beside measured, and what that means.

Where the plan is for other hardware, what is verified is the same model, spread in the same way over the ranks
that there are here, with fewer of its repeated layers if it has to be.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.plan.answer import Answer
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof import fresh_ranks
from torchmuster.plan.proof.comparison import MEMORY_BAND, TIME_BAND, signed_percent, step_seconds
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.search.candidates import Look
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes

PROGRAM = "torchmuster.plan.probes.real_steps"
# What is alive in a step is the same from the second one on; the third is sure not to be special, nor is the fourth.
FOLLOWED = 4


@dataclass(frozen=True, kw_only=True)
class RealSteps:
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


def run_real_steps(
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
    told = RealSteps(
        work=work,
        candidate=candidate,
        device="cpu" if device == "cpu" else "auto",
        timed=steps,
        blocks=blocks,
    )
    ran = fresh_ranks.run_fresh_ranks(
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
        why=fresh_ranks.describe_failure(ran.trouble),
        fix=ran.trouble.fix,
    )


EXACT = 0.01  # what is nearer than this is as predicted
_HERE_AT_MOST = 0.5  # of this machine's memory, for all ranks of a stand-in
_BLOCKS_OF_A_STAND_IN = (4, 3, 2)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is to be held against real steps."""

    work: Work
    candidate: Candidate
    blocks: int | None  # of the model's repeated layers; None: all
    tensor_bytes: int
    reserved_bytes: int | None = None
    step_s: float | None = None
    instead: str = ""  # what it stands for, where the plan itself cannot be tried here


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure: predicted, measured, and how far they may be apart."""

    name: str
    predicted: float
    measured: float
    unit: Literal["bytes", "s"]
    band: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    def __str__(self) -> str:
        show = step_seconds if self.unit == "s" else lambda amount: format_bytes(int(amount))
        return (
            f"{self.name}: predicted {show(self.predicted)}, measured {show(self.measured)} "
            f"({signed_percent(self.ratio)})"
        )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The figures side by side, and the verdicts on them."""

    predicted: Predicted
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]


class MeasureSteps(Protocol):
    """Takes real steps on this machine."""

    def __call__(
        self,
        work: Work,
        candidate: Candidate,
        *,
        ranks: int,
        device: Literal["cpu", "gpu"],
        steps: int,
        blocks: int | None,
    ) -> Sequence[RankSteps]:
        """Return what each rank saw."""


def verify_plan(
    answer: Answer, *, here: Hardware, look: Look, say: Callable[[str], None] = lambda _: None
) -> Verified:
    """Hold the chosen way of a plan against real steps on this machine, which is ``here``.

    ``look`` traces what stands for a plan whose hardware is elsewhere. ``say`` hears that the steps go on.
    """
    best, asked = answer.chosen.value, answer.asked
    on_cpu = here.card.kind == "cpu"
    if is_here(asked.hardware, here, best.candidate):
        predicted = Predicted(
            work=asked.work,
            candidate=best.candidate,
            blocks=None,
            tensor_bytes=best.memory.tensor_bytes,
            reserved_bytes=best.memory.reserved_bytes,
            step_s=None if best.time is None else best.time.step_s,
        )
    else:
        ranks = max(here.cards, 2) if on_cpu else here.cards  # any CPU can be shared by two
        predicted = substitute_model(asked.work, best.candidate, here=here, ranks=ranks, look=look)
    return compare_with_plan(
        predicted, device="cpu" if on_cpu else "gpu", measure=partial(run_real_steps, say=say)
    )


def compare_with_plan(
    predicted: Predicted, *, device: Literal["cpu", "gpu"], measure: MeasureSteps, steps: int = 5
) -> Verified:
    """Take real steps, and hold what was predicted against them."""
    seen = measure(
        predicted.work,
        predicted.candidate,
        ranks=predicted.candidate.layout.ranks,
        device=device,
        steps=steps,
        blocks=predicted.blocks,
    )
    rows = tuple(_rows(predicted, seen))
    findings = [_judge(row) for row in rows]
    if predicted.instead:
        note = Finding(
            name="plan-verified-elsewhere",
            status=Status.NOTE,
            what=f"verified here: {predicted.instead}",
            why="what the plan is for is not here; its memory is predicted in the same way, its times by "
            "the rates of its cards, which nothing here can confirm",
        )
        findings.append(note)
    return Verified(predicted=predicted, rows=rows, findings=tuple(findings))


def _rows(predicted: Predicted, seen: Sequence[RankSteps]) -> list[Row]:
    most = max(seen, key=lambda one: one.peak_bytes)
    rows = [
        Row(
            name=f"memory of tensors (rank {most.rank} of {len(seen)})",
            predicted=predicted.tensor_bytes,
            measured=most.peak_bytes,
            unit="bytes",
            band=MEMORY_BAND,
        )
    ]
    reserved = [one.reserved_bytes for one in seen if one.reserved_bytes is not None]
    if reserved and predicted.reserved_bytes:
        rows.append(
            Row(
                name="memory reserved by the allocator",
                predicted=predicted.reserved_bytes,
                measured=max(reserved),
                unit="bytes",
                band=2 * MEMORY_BAND,
            )
        )
    if predicted.step_s is not None and all(one.step_s for one in seen):
        # A step is over when its slowest rank is.
        slowest = [max(times) for times in zip(*(one.step_s for one in seen), strict=True)]
        rows.append(
            Row(
                name="time of a step",
                predicted=predicted.step_s,
                measured=statistics.median(slowest),
                unit="s",
                band=TIME_BAND,
            )
        )
    return rows


def _judge(row: Row) -> Finding:
    name = "plan-memory" if row.unit == "bytes" else "plan-time"
    off = abs(row.ratio - 1)
    if off <= row.band:
        words = "as predicted" if off <= EXACT else f"within {row.band:.0%}".replace("%", " %")
        return Finding(name=name, status=Status.OK, what=f"{row}, {words}")
    if row.ratio < 1:
        return Finding(
            name=name,
            status=Status.NOTE,
            what=f"{row}, better than the {row.band * 100:.0f} % that it may be off",
            why="the plan is too careful here: it may refuse what would fit, or forecast too many hours",
        )
    if row.unit == "s":
        return Finding(
            name=name,
            status=Status.WARNING,
            what=f"{row}, slower than the {row.band * 100:.0f} % that it may be off",
            why="hours and cost of the plan are as wrong as this; others that compute on this machine slow "
            "it down too",
            fix="muster plan --calibrate  # measures this machine's rates, and plans with them",
        )
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=f"{row}, more than the {row.band * 100:.0f} % that it may be off",
        why="what the plan says fits may not fit: the model does something that the trace does not show",
        fix=f"leave {signed_percent(row.ratio)} more room than the plan asks for, or find the micro-batch by "
        "trials: muster plan --find-batch-size",
    )


# ---- a plan for other hardware


def is_here(hardware: Hardware, here: Hardware, candidate: Candidate) -> bool:
    """Say whether a plan's ranks could run on this machine as they are."""
    alike = (hardware.card.kind, hardware.card.name) == (here.card.kind, here.card.name)
    return alike and candidate.layout.ranks <= here.cards


def smaller_layout(candidate: Candidate, ranks: int) -> Candidate:
    """Return the same way to train on fewer ranks; copies of shards stay that where there are four."""
    ranks = min(ranks, candidate.layout.ranks)
    if candidate.strategy == "single" or ranks == 1:
        layout = ShardLayout(copies=1, shards=1)
        if candidate.strategy == "fsdp":
            return replace(candidate, layout=layout)
        return replace(candidate, strategy="single", layout=layout)
    if candidate.strategy == "ddp":
        layout = ShardLayout(copies=ranks, shards=1)
    elif candidate.layout.copies > 1 and ranks >= 4:
        layout = ShardLayout(copies=2, shards=ranks // 2)
    else:
        layout = ShardLayout(copies=1, shards=ranks)
    return replace(candidate, layout=layout)


def substitute_model(
    work: Work,
    candidate: Candidate,
    *,
    here: Hardware,
    ranks: int,
    look: Look,
) -> Predicted:
    """Return what can be tried here in place of a plan: as many layers of the model as there is room for.

    Of many micro-batches in a step two show what all take: the first is unlike the others, which are alike.
    """
    small = replace(
        smaller_layout(candidate, ranks),
        micro_batch_size=1,
        accumulation=min(candidate.accumulation, 2),
    )
    on_cpu = here.card.kind == "cpu"
    kernels: Literal["cpu", "cuda"] = "cpu" if on_cpu else "cuda"
    room = _room_of_each(here, small.layout.ranks)
    record: TraceRecord | None = None
    for blocks in _BLOCKS_OF_A_STAND_IN:
        request = TraceRequest(work=work, candidate=small, blocks=blocks, kernels=kernels)
        (traced,) = look([request])
        if isinstance(traced, TraceRefused):
            raise Impossible(traced.what, why=traced.why, fix=traced.fix)
        record = traced
        if record.peak_bytes <= room:
            return _of_record(record, small, "the CPU" if on_cpu else here.card.name)
    assert record is not None
    raise Impossible(
        "this plan cannot be verified on this machine",
        why=f"even {record.blocks_traced} of the model's {record.blocks} layers take "
        f"{format_bytes(record.peak_bytes)} on each of {small.layout.ranks} ranks, and "
        f"{format_bytes(room)} may be used for each here",
        fix="muster plan --verify on the hardware that the plan is for",
    )


def _room_of_each(here: Hardware, ranks: int) -> int:
    """Return what a rank of a stand-in may take: others use this machine, too."""
    memory = here.card.memory_bytes or 0
    if here.card.kind == "cpu":
        memory = (here.host_memory_bytes or memory * here.cards) // ranks
    return int(memory * _HERE_AT_MOST)


def _of_record(record: TraceRecord, candidate: Candidate, device: str) -> Predicted:
    ranks = candidate.layout.ranks
    layers = f"{record.blocks_traced} of {record.blocks} layers"
    return Predicted(
        work=record.request.work,
        candidate=candidate,
        blocks=record.request.blocks,
        tensor_bytes=record.peak_bytes,
        instead=f"{layers}, {candidate.strategy} on {ranks} rank{'s' if ranks > 1 else ''} of {device}, "
        "micro-batches of 1",
    )
