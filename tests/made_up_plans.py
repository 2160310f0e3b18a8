"""A model and hardware that do not exist: its traces follow from arithmetic, so plans need no torch."""

import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import Cost, Part, Peak, Shape, TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

WORK = Work(build="made_up:model", sequence_length=1024)
ONE = ShardLayout(copies=1, shards=1)
CARD = Gpu(
    name="made-up",
    memory_bytes=80 * GiB,
    flops={"bfloat16": 1e15, "float32": 1e14},
    bandwidth_bytes_s=3e12,
    source="made up",
    within_bytes_s=400e9,
    network_bytes_s=25e9,
    network_is_shared=False,
)
EXITS, REFUSED, SLOW = 13, 14, 15  # numbers of blocks, for the process below
# Activations that stay, and flops of a step in forwards, by recompute mode.
_STAYS = {"none": 1.0, "selective": 0.5, "full": 0.1}
_FORWARDS = {"none": 3.0, "selective": 3.1, "full": 4.0}


def hardware(*, machines: int = 1, cards: int = 8, memory_gib: float = 80) -> Hardware:
    """Return machines with made-up cards."""
    return Hardware(
        card=replace(CARD, memory_bytes=int(memory_gib * GiB)),
        machines=machines,
        cards_per_machine=cards,
        host_memory_bytes=1024 * GiB,
    )


def question(on: Hardware | None = None, **changes: object) -> PlanRequest:
    """Return a request with nothing fixed."""
    request = PlanRequest(
        work=WORK,
        hardware=on or hardware(),
        precision=Decision(value="bf16", reason="bf16: made-up has it"),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def fsdp(ranks: int = 8, **changes: object) -> Candidate:
    """Return full shards over a number of ranks."""
    layout = ShardLayout(copies=1, shards=ranks)
    return Candidate(strategy="fsdp", layout=layout, precision="bf16", **changes)  # type: ignore[arg-type]


@dataclass
class MadeUpModel:
    """A model of 32 equal blocks: its states, activations and flops are linear in the blocks."""

    parameters: int = 7_000_000_000
    sample_gib: float = 10.0  # activations of a sample, without recomputation
    blocks: int = 32
    traced: list[TraceRequest] = field(default_factory=list)

    def trace(self, request: TraceRequest) -> TraceRecord:
        """Return the record of a request, as :meth:`record`, and note the request."""
        if request not in self.traced:
            self.traced.append(request)
        return self.record(request)

    def record(self, request: TraceRequest) -> TraceRecord:
        """Return the record of a request."""
        candidate, work = request.candidate, request.work
        share = (request.blocks or self.blocks) / self.blocks
        trained = 1.0 if work.lora is None else 0.01
        item = 4.0
        if work.torch_dtype == "bfloat16":
            item = 2.0
        if work.load_in_4bit:
            item = 0.5
        weights = self.parameters * share * item
        states = (weights + 3 * trained * 4 * self.parameters * share) / candidate.layout.shards
        mode = str(candidate.recompute)
        samples = self.sample_gib * GiB * _STAYS.get(mode, 0.5) * share * candidate.micro_batch_size
        on_device = 0 if candidate.cpu_offload else states
        forward = 2 * self.parameters * share * 1024 * candidate.micro_batch_size
        sent = {}
        if candidate.layout.shards > 1:
            sent["shards"] = round(4 * self.parameters * share)
        elif candidate.layout.copies > 1:
            sent["copies"] = round(8 * self.parameters * share)
        cost = Cost(
            operations=100,
            flops={"bfloat16": round(_FORWARDS.get(mode, 3.5) * forward)},
            moved_bytes=0,
            sent_bytes=sent,
        )
        update = Cost(
            operations=1,
            flops={},
            moved_bytes=round(on_device),
            sent_bytes={},
        )
        parts: dict[Part, Cost] = {"first": cost, "last": cost, "update": update}
        rows = 8192
        columns = self.parameters // self.blocks // rows
        dtype = {4.0: "float32", 2.0: "bfloat16", 0.5: "nf4"}[item]
        peak = Peak(
            phase="backward",
            micro_batch=0,
            block=None,
            peak_bytes=round(on_device + samples),
            by_category={"parameters": round(on_device), "activations": round(samples)},
        )
        return TraceRecord(
            request=request,
            blocks_traced=request.blocks or self.blocks,
            blocks=self.blocks,
            parameters=(Shape(shape=(rows, columns), dtype=dtype, block=0),),
            parameter_count=self.parameters,
            trained_count=round(self.parameters * trained),
            input_bytes=8192,
            host_bytes=round(states) if candidate.cpu_offload else 0,
            peaks=(peak,) if request.steps else (),
            costs=parts if request.steps else {},
        )


def answer_with_made_up_records(connection: Connection, errors: str) -> None:
    """Answer requests as the process that traces does; it is here so that the process can import it."""
    model = MadeUpModel()
    while True:
        request: TraceRequest = connection.recv()
        if request.blocks == EXITS:
            Path(errors).write_text("no room: token=hf_abcdefghijklmnopqrstuvwxyz012345")
            sys.exit(3)
        if request.blocks == SLOW:
            time.sleep(0.5)
        with open(f"{request.work.folder}/asked", "a") as file:
            file.write(f"{request.blocks} ")
        if request.blocks == REFUSED:
            connection.send(Impossible("cannot", why="because", fix="do"))
        else:
            connection.send(model.record(request))
