"""Decide whether every rank can hold a copy of a model: by its states if clear, else by a trace.

The size of the states (parameters, gradients, optimizer) is known without a trace. If they are a
small part of the memory, a copy fits; if they exceed it, none does. In between, the choice depends
on the activations, which are traced.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.decision import Decision
from torchmuster.devices.for_model import states_decide
from torchmuster.errors import MusterError
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.proof.comparison import Promise
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.candidates import Look, Traces
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes

Name: TypeAlias = Literal["single", "ddp", "fsdp"]
_UNUSED = Link(latency_s=0.0, bytes_s=1.0)  # memory does not depend on links


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model to spread over ranks, and the memory of each rank."""

    work: Work
    ranks: int
    ranks_per_machine: int
    states_bytes: int
    memory_bytes: int  # of the rank with the least
    device: str  # cuda, rocm, xpu, cpu
    precision: Literal["fp32", "bf16", "fp16"]
    recompute: Literal["none", "full", "selective"] | int
    micro_batch_size: int
    accumulation: int

    @property
    def is_clear(self) -> bool:
        """Whether the size of the states is enough to decide."""
        return states_decide(self.states_bytes, self.memory_bytes)

    @property
    def copies(self) -> Candidate:
        """A whole copy on each rank."""
        return Candidate(
            strategy="ddp",
            layout=ShardLayout(copies=self.ranks, shards=1),
            precision=self.precision,
            recompute=self.recompute,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
        )

    @property
    def hardware(self) -> Hardware:
        """The hardware, with its memory only."""
        return Hardware(
            card=Gpu(
                name=self.device,
                memory_bytes=self.memory_bytes,
                flops={},
                bandwidth_bytes_s=None,
                kind=self.device,
            ),
            machines=-(-self.ranks // self.ranks_per_machine),
            cards_per_machine=self.ranks_per_machine,
            within=_UNUSED,
            between=_UNUSED,
        )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How to spread a model, and its forecast if it was traced."""

    name: Name
    promise: Promise | None = None


def strategy_for(question: Question, by_states: Decision[Name], look: Look) -> Decision[Spread]:
    """Decide between ddp and fsdp; ``by_states`` is the decision by sizes, kept if it is clear.

    ``look`` traces. If tracing fails, the decision by sizes is used, and the reason says so.
    """
    if question.is_clear:
        return Decision(value=Spread(name=by_states.value), reason=by_states.reason)
    try:
        needed = _needed(question, look)
    except MusterError as error:
        reason = f"{by_states.reason} (based on its states alone: {error.what})"
        return Decision(value=Spread(name=by_states.value), reason=reason)
    return _by_trace(question, needed)


def _needed(question: Question, look: Look) -> memory.Memory:
    precision = Decision(value=question.precision, reason="set by the training run")
    asked = PlanRequest(work=question.work, hardware=question.hardware, precision=precision)
    records = Traces(asked, look).of(question.copies)
    if isinstance(records, TraceRefused):
        raise MusterError(records.what, why=records.why, fix=records.fix)
    return memory.predict_memory(records, question.copies, hardware=question.hardware)


def _by_trace(question: Question, needed: memory.Memory) -> Decision[Spread]:
    has = format_bytes(question.memory_bytes)
    takes = (
        f"takes {format_bytes(needed.total_bytes)} of {has} per rank with micro-batches of "
        f"{question.micro_batch_size} ({format_bytes(question.states_bytes)} of it states)"
    )
    promise = Promise(
        candidate=question.copies,
        hardware=f"{question.ranks} ranks with {has}",
        tensor_bytes=needed.tensor_bytes,
    )
    if needed.high_bytes <= question.memory_bytes:
        return Decision(
            value=Spread(name="ddp", promise=promise),
            reason=f"ddp: according to a trace, a full copy {takes}",
        )
    return Decision(
        value=Spread(name="fsdp"),
        reason=f"fsdp: according to a trace, a full copy {takes}, up to "
        f"{format_bytes(needed.high_bytes)}: too much; sharded over {question.ranks} ranks the states take "
        f"{format_bytes(question.states_bytes // question.ranks)}",
    )
