"""Models, hardware and forecasts that do not exist, so that decisions can be tested without a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from torchmuster.decision import Decision
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.record import Peak, Shape, TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.forecast import StepTime
from torchmuster.plan.timing.rates import CATALOGUED
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

WORK = Work(build="made_up:model", sequence_length=1024)
CARD = Gpu(
    name="made-up",
    memory_bytes=80 * GiB,
    flops={"bfloat16": 1e15, "float32": 1e14},
    bandwidth_bytes_s=3e12,
    source="made up",
)
FAST = Link(latency_s=1e-6, bytes_s=400e9, source="made up")
SLOW = Link(latency_s=1e-5, bytes_s=25e9, source="made up")


def hardware(*, machines: int = 1, cards: int = 8, memory_gib: float = 80) -> Hardware:
    """Return machines with made-up cards."""
    return Hardware(
        card=replace(CARD, memory_bytes=int(memory_gib * GiB)),
        machines=machines,
        cards_per_machine=cards,
        within=FAST,
        between=SLOW,
        host_memory_bytes=1024 * GiB,
    )


def question(on: Hardware | None = None, **changes: object) -> PlanRequest:
    """Return a question with nothing fixed."""
    asked = PlanRequest(
        work=WORK,
        hardware=on or hardware(),
        precision=Decision(value="bf16", reason="bf16: made-up has it"),
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def record(
    request: TraceRequest, *, parameters: int = 7_000_000_000, blocks: int = 32
) -> TraceRecord:
    """Return a record of a model of equal blocks; its peaks and times are not looked at."""
    rows = 8192
    shape = Shape(
        name="block.weight",
        shape=(rows, parameters // blocks // rows),
        dtype="float32",
        trained=True,
        block=0,
        copies=blocks,
    )
    return TraceRecord(
        request=request,
        torch="2.13",
        blocks_traced=request.blocks or blocks,
        blocks=blocks,
        blocks_alike=True,
        parameters=(shape,),
        parameter_count=parameters,
        trained_count=parameters,
        samples_per_micro_batch=request.candidate.micro_batch_size,
        tokens_per_sample=1024,
        states={},
        first_step_peak_bytes=1,
        peaks=(),
        timeline=(),
        host_bytes=0,
    )


@dataclass
class MadeUpModel:
    """A model whose memory and time are simple sums; counts what is traced."""

    parameters: int = 7_000_000_000
    sample_gib: float = 6.0  # activations of one sample, nothing computed again
    sample_s: float = 0.05  # computing of one sample
    blocks: int = 32

    def __post_init__(self) -> None:
        self.traced: list[TraceRequest] = []

    def look(self, requests: Sequence[TraceRequest]) -> list[TraceRecord]:
        """Stand for the tracer."""
        self.traced += requests
        return [record(one, parameters=self.parameters, blocks=self.blocks) for one in requests]

    def memory(
        self, records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        """Stand for memory.predict."""
        kept = {"none": 1.0, "selective": 0.5, "full": 0.1}[str(candidate.recompute)]
        states = 0 if candidate.cpu_offload else 16 * self.parameters // candidate.layout.shards
        gathered = 0 if candidate.reshard else 2 * self.parameters
        activations = int(kept * self.sample_gib * candidate.micro_batch_size * GiB)
        tensors = states + gathered + activations
        host = 16 * self.parameters // candidate.layout.shards if candidate.cpu_offload else 0
        return Memory(
            tensor_bytes=tensors,
            by_category={"parameters": states + gathered, "activations": activations},
            where=Peak(
                phase="backward",
                micro_batch=0,
                block=31,
                after_block=None,
                peak_bytes=tensors,
                by_category={},
                operation="aten.mm",
                module="block",
            ),
            reserved_bytes=None,
            outside=(),
            total_bytes=int(1.02 * tensors),
            low_bytes=tensors,
            high_bytes=int(1.05 * tensors),
            host_bytes=host * min(candidate.layout.ranks, hardware.cards_per_machine),
            save_host_bytes=12 * self.parameters // hardware.machines,
            save_bytes=12 * self.parameters,
            origin="made up",
        )

    def time(
        self,
        records: Sequence[TraceRecord],
        candidate: Candidate,
        *,
        hardware: Hardware,
        rates: object,
    ) -> StepTime:
        """Stand for timing.predict."""
        again = {"none": 1.0, "selective": 1.05, "full": 1.33}[str(candidate.recompute)]
        portions = candidate.micro_batch_size * candidate.accumulation
        compute = again * self.sample_s * portions
        layout = candidate.layout
        link = hardware.within if layout.ranks <= hardware.cards_per_machine else hardware.between
        gathers = {"single": 0, "ddp": 0, "fsdp": 2 if candidate.reshard else 1}
        near = hardware.within if layout.shards <= hardware.cards_per_machine else hardware.between
        sent = candidate.accumulation * gathers[candidate.strategy] * 2 * self.parameters
        sent_s = sent / near.bytes_s + (layout.ranks > 1) * 2 * self.parameters / link.bytes_s
        exposed = max(sent_s - 0.5 * compute, 0.0) + 10.0 * candidate.cpu_offload
        per_s = candidate.global_batch_size / (compute + exposed)
        return StepTime(
            step_s=compute + exposed,
            compute_s=compute,
            communication_s=sent_s,
            exposed_s=exposed,
            model_flops=1e12,
            mfu=0.4,
            samples_per_s=per_s,
            tokens_per_s=1024 * per_s,
            origin="made up",
        )

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> "MadeUpModel":
        """Take the place of the forecasts."""
        monkeypatch.setattr(memory, "predict_memory", self.memory)
        monkeypatch.setattr(memory, "check_records", lambda records, traced: None)
        monkeypatch.setattr(timing, "predict_time", self.time)
        return self


RATES = CATALOGUED
ONE = ShardLayout(copies=1, shards=1)
