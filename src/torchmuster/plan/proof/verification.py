"""Verify a plan with a few real steps on this machine: predicted against measured.

If the plan is for other hardware, the same model and strategy are verified on the ranks available
here, with fewer of the model's repeated layers if necessary.
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
# Memory is the same from the second step on; the third and fourth steps are surely typical.
FOLLOWED = 4


@dataclass(frozen=True, kw_only=True)
class RealSteps:
    """The request to each rank: the work, the candidate, and how many steps to time."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    timed: int
    blocks: int | None = None  # number of the model's repeated layers to use; None: all


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured."""

    rank: int
    device: str
    peaks_bytes: tuple[int, ...]  # of tensors on the device, in each of the first steps
    reserved_bytes: int | None  # peak of an accelerator's allocator; None on the CPU
    step_s: tuple[float, ...]  # of the steps after them, without memory tracking
    loss: float  # mean loss of one more micro-batch

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
    ranks: int,
    device: Literal["cpu", "gpu"] = "cpu",
    steps: int = 5,
    blocks: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[RankSteps]:
    """Run real steps on ranks of this machine; return what each of them measured, by rank.

    Memory is tracked in the first steps, and ``steps`` more are timed. ``blocks`` limits the number
    of repeated layers. A rank that fails stops all; the error has its failure. ``say`` receives the
    progress.
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
            "the real steps failed",
            why=f"{len(ran.texts)} of {ranks} ranks reported a result",
            fix="try again; the plan itself is not affected",
        )
    raise MusterError(
        "the real steps failed",
        why=fresh_ranks.describe_failure(ran.trouble),
        fix=ran.trouble.fix,
    )


EXACT = 0.01  # a smaller difference counts as exact
_HERE_AT_MOST = 0.5  # share of this machine's memory for all ranks of a substitute model
_BLOCKS_OF_A_STAND_IN = (4, 3, 2)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predictions to compare with real steps."""

    work: Work
    candidate: Candidate
    blocks: int | None  # of the model's repeated layers; None: all
    tensor_bytes: int
    reserved_bytes: int | None = None
    step_s: float | None = None
    instead: str = ""  # what was run, if the plan itself cannot be run here


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure: predicted, measured, and the allowed difference."""

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
    """The figures with their predictions, and the findings about them."""

    predicted: Predicted
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]


class MeasureSteps(Protocol):
    """Run real steps on this machine."""

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
        """Return what each rank measured."""


def verify_plan(
    answer: Answer, *, here: Hardware, look: Look, say: Callable[[str], None] = lambda _: None
) -> Verified:
    """Compare the chosen candidate of a plan with real steps on this machine, which is ``here``.

    ``look`` traces a substitute if the plan is for other hardware. ``say`` receives the progress.
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
        ranks = max(here.cards, 2) if on_cpu else here.cards  # two ranks can share any CPU
        predicted = substitute_model(asked.work, best.candidate, here=here, ranks=ranks, look=look)
    return compare_with_plan(
        predicted, device="cpu" if on_cpu else "gpu", measure=partial(run_real_steps, say=say)
    )


def compare_with_plan(
    predicted: Predicted, *, device: Literal["cpu", "gpu"], measure: MeasureSteps, steps: int = 5
) -> Verified:
    """Run real steps and compare them with the predictions."""
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
            why="the hardware of the plan is not available here: the same method predicts its "
            "memory, but its step times cannot be verified",
        )
        findings.append(note)
    return Verified(predicted=predicted, rows=rows, findings=tuple(findings))


def _rows(predicted: Predicted, seen: Sequence[RankSteps]) -> list[Row]:
    most = max(seen, key=lambda one: one.peak_bytes)
    rows = [
        Row(
            name=f"tensor memory (rank {most.rank} of {len(seen)})",
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
        # A step takes as long as on its slowest rank.
        slowest = [max(times) for times in zip(*(one.step_s for one in seen), strict=True)]
        rows.append(
            Row(
                name="step time",
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
            what=f"{row}, more than {row.band * 100:.0f} % below the prediction",
            why="the plan is too conservative here: it may refuse a configuration that would fit, "
            "or forecast too many hours",
        )
    if row.unit == "s":
        return Finding(
            name=name,
            status=Status.WARNING,
            what=f"{row}, more than {row.band * 100:.0f} % slower than predicted",
            why="the plan's hours and cost are off by the same ratio, unless other programs "
            "slowed down this measurement",
            fix="muster plan --calibrate  # measures this machine's rates and plans with them",
        )
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=f"{row}, more than {row.band * 100:.0f} % above the prediction",
        why="a configuration that fits according to the plan may run out of memory: the model "
        "does something "
        "that the trace does not show",
        fix=f"leave {signed_percent(row.ratio)} more free memory than the plan requires, or find "
        "the micro-batch by trials: muster plan --find-batch-size",
    )


# ---- a plan for other hardware


def is_here(hardware: Hardware, here: Hardware, candidate: Candidate) -> bool:
    """Return whether a plan's ranks can run on this machine unchanged."""
    alike = (hardware.card.kind, hardware.card.name) == (here.card.kind, here.card.name)
    return alike and candidate.layout.ranks <= here.cards


def smaller_layout(candidate: Candidate, ranks: int) -> Candidate:
    """Return the candidate on fewer ranks; hybrid sharding stays hybrid from four ranks on."""
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
    """Return a substitute that can run here: as many layers of the model as fit in memory.

    Two micro-batches per step are enough: only the first differs from the others.
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
        why=f"even {record.blocks_traced} of the model's {record.blocks} layers need "
        f"{format_bytes(record.peak_bytes)} on each of {small.layout.ranks} ranks, and "
        f"at most {format_bytes(room)} may be used for each here",
        fix="run muster plan --verify on the hardware of the plan",
    )


def _room_of_each(here: Hardware, ranks: int) -> int:
    """Return the memory that a rank of the substitute may use; other programs need some too."""
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
        instead=f"{layers}, {candidate.strategy} on {ranks} rank{'s' if ranks > 1 else ''} "
        f"of {device}, micro-batches of 1",
    )
