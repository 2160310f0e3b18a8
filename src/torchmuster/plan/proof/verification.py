"""Verify a plan with a few real steps on this machine: predicted against measured.

If the plan is for other hardware, the same model and strategy are verified on the ranks available
here, with fewer of the model's repeated layers.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof.comparison import MEMORY_BAND, signed_percent, step_seconds
from torchmuster.plan.proof.real_ranks import RankSteps, ran_out, run_real_steps
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.search import Trace
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes

_SUBSTITUTE_SHARE = 0.5  # of this machine's memory, at most, for all ranks of a substitute model
_SUBSTITUTE_BLOCKS = (4, 3, 2)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predictions to compare with real steps."""

    candidate: Candidate
    tensor_bytes: int
    blocks: int | None = None  # of the model's repeated layers; None: all
    reserved_bytes: int | None = None
    step_s: float | None = None
    substitute: str = ""  # what was run, if the plan itself cannot be run here


def verify_plan(
    answer: Answer, *, here: Hardware, trace: Trace, say: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Compare the chosen candidate of a plan with real steps on this machine, which is ``here``.

    ``trace`` traces a substitute if the plan is for other hardware.
    """
    best, request = answer.chosen.value, answer.request
    planned_card, card = request.hardware.card, here.card
    is_for_here = (planned_card.kind, planned_card.name) == (card.kind, card.name)
    if is_for_here and best.candidate.layout.ranks <= here.cards:
        expected, _, _ = estimate.device_bytes(best.memory.tensor_bytes, here)
        predicted = Predicted(
            candidate=best.candidate,
            tensor_bytes=best.memory.tensor_bytes,
            reserved_bytes=expected,
            step_s=None if best.time is None else best.time.step_s,
        )
    else:
        predicted = substitute_model(request.work, best.candidate, here=here, trace=trace)
    ranks = run_real_steps(
        request.work,
        predicted.candidate,
        device="cpu" if card.kind == "cpu" else "gpu",
        blocks=predicted.blocks,
        say=say,
    )
    if ran_out(ranks):
        raise MusterError(
            "the planned configuration ran out of memory in its real steps",
            why="; ".join(rank.ran_out for rank in ranks),
            fix="find the micro-batch by trials: muster plan --find-batch-size",
        )
    return list(findings_of(predicted, ranks))


def findings_of(predicted: Predicted, measured: Sequence[RankSteps]) -> Iterator[Finding]:
    """Yield a finding for each figure: memory more than its band above the plan is a failure."""
    most = max(measured, key=lambda rank: rank.peak_bytes)
    figure = f"tensor memory (rank {most.rank} of {len(measured)})"
    yield _judged_memory(figure, predicted.tensor_bytes, most.peak_bytes, MEMORY_BAND)
    reserved = [rank.reserved_bytes for rank in measured if rank.reserved_bytes is not None]
    if reserved and predicted.reserved_bytes:
        figure = "memory reserved by the allocator"
        yield _judged_memory(figure, predicted.reserved_bytes, max(reserved), estimate.BAND - 1)
    # A step takes as long as on its slowest rank.
    slowest = [max(times) for times in zip(*(rank.step_s for rank in measured), strict=True)]
    yield _judged_time(predicted.step_s, statistics.median(slowest))
    if predicted.substitute:
        yield Finding(
            name="plan-verified-elsewhere",
            status=Status.NOTE,
            what=f"verified here: {predicted.substitute}",
            why="the hardware of the plan is not available here: the same method predicts its "
            "memory, but its step times cannot be verified",
        )


def _judged_memory(figure: str, planned: int, measured: int, band: float) -> Finding:
    ratio = measured / planned
    what = (
        f"{figure}: predicted {format_bytes(planned)}, measured {format_bytes(measured)} "
        f"({signed_percent(ratio)})"
    )
    if ratio <= 1 + band:
        status = Status.OK if ratio >= 1 - band else Status.NOTE
        return Finding(name="plan-memory", status=status, what=what)
    return Finding(
        name="plan-memory",
        status=Status.FAILURE,
        what=f"{what}, more than {band * 100:.0f} % above the prediction",
        why="a configuration that fits according to the plan may run out of memory",
        fix="find the micro-batch by trials: muster plan --find-batch-size",
    )


def _judged_time(planned_s: float | None, measured_s: float) -> Finding:
    measured = f"step time: measured {step_seconds(measured_s)}"
    if planned_s is None:
        return Finding(name="plan-time", status=Status.NOTE, what=f"{measured}, not predicted")
    ratio = measured_s / planned_s
    what = f"{measured}, roughly predicted {step_seconds(planned_s)} ({signed_percent(ratio)})"
    if 1 / estimate.TIME_BAND <= ratio <= estimate.TIME_BAND:
        return Finding(name="plan-time", status=Status.OK, what=what)
    return Finding(
        name="plan-time",
        status=Status.WARNING if ratio > 1 else Status.NOTE,
        what=f"{what}, outside of the band",
        fix="find out what a step waits for: muster profile",
    )


# ---- a plan for other hardware


def smaller_layout(candidate: Candidate, ranks: int) -> Candidate:
    """Return the candidate on fewer ranks; hybrid sharding stays hybrid from four ranks on."""
    ranks = min(ranks, candidate.layout.ranks)
    layout = ShardLayout(copies=1, shards=ranks)
    if candidate.strategy != "fsdp" and ranks == 1:
        return replace(candidate, strategy="single", layout=layout)
    if candidate.strategy == "ddp":
        layout = ShardLayout(copies=ranks, shards=1)
    elif candidate.layout.copies > 1 and ranks >= 4:
        layout = ShardLayout(copies=2, shards=ranks // 2)
    return replace(candidate, layout=layout)


def substitute_model(
    work: Work, candidate: Candidate, *, here: Hardware, trace: Trace
) -> Predicted:
    """Return a substitute that can run here: as many layers of the model as fit in memory.

    Two micro-batches per step are enough: only the first differs from the others.
    """
    on_cpu = here.card.kind == "cpu"
    ranks, memory = here.cards, here.card.memory_bytes
    if on_cpu:
        ranks = max(ranks, 2)  # two ranks can share any CPU
        memory = (here.host_memory_bytes or memory * here.cards) // ranks
    small = replace(
        smaller_layout(candidate, ranks),
        micro_batch_size=1,
        accumulation=min(candidate.accumulation, 2),
    )
    room = int(memory * _SUBSTITUTE_SHARE)
    why = ""
    for blocks in _SUBSTITUTE_BLOCKS:
        request = TraceRequest(
            work=work, candidate=small, blocks=blocks, kernels="cpu" if on_cpu else "cuda"
        )
        (record,) = trace([request])
        if isinstance(record, TraceRefused):
            raise Impossible(record.what, why=record.why, fix=record.fix)
        layers = f"{record.blocks_traced} of {record.blocks} layers"
        if record.peak_bytes <= room:
            device = "the CPU" if on_cpu else here.card.name
            return Predicted(
                candidate=small,
                blocks=blocks,
                tensor_bytes=record.peak_bytes,
                substitute=f"{layers}, {small.strategy} on {small.layout.ranks} ranks of {device}, "
                "micro-batches of 1",
            )
        why = (
            f"even {layers} need {format_bytes(record.peak_bytes)} on each of "
            f"{small.layout.ranks} ranks, and at most {format_bytes(room)} may be used for each"
        )
    raise Impossible(
        "this plan cannot be verified on this machine",
        why=why,
        fix="run muster plan --verify on the hardware of the plan",
    )
