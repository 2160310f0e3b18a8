"""What the allocator makes of a way is simulated once for the same traces."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from made_up_plans import MadeUpModel, hardware, question, record
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.search.simulated import simulate_allocator
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

WAY = Candidate(strategy="fsdp", layout=ShardLayout(copies=1, shards=8), precision="bf16")


class Simulations:
    """Stands for memory.predict, and counts."""

    def __init__(self) -> None:
        self.made = 0
        self.reserved_bytes: int | None = GiB

    def __call__(
        self, records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        self.made += 1
        needed = MadeUpModel().memory(records, candidate, hardware=hardware)
        return replace(needed, reserved_bytes=self.reserved_bytes)


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> Simulations:
    made = Simulations()
    monkeypatch.setattr(memory, "predict_memory", made)
    return made


def traces(log: Path | None) -> list[TraceRecord]:
    request = TraceRequest(
        work=question().work, candidate=WAY, blocks=3, kernels="cuda", keep_log=True
    )
    made = record(request, parameters=1000, blocks=32)
    return [replace(made, log=None if log is None else str(log))]


def test_the_same_traces_are_simulated_once(tmp_path: Path, simulations: Simulations) -> None:
    records = traces(tmp_path / "a.jsonl")
    first = simulate_allocator(records, WAY, hardware=hardware())
    assert simulate_allocator(records, WAY, hardware=hardware()) == first
    assert simulations.made == 1
    (kept,) = tmp_path.glob("*.memory.json")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert simulate_allocator(records, WAY, hardware=hardware()) == first
    assert simulations.made == 2, "what is damaged is simulated again"


def test_other_traces_ways_and_cards_are_simulated(
    tmp_path: Path, simulations: Simulations
) -> None:
    records = traces(tmp_path / "a.jsonl")
    simulate_allocator(records, WAY, hardware=hardware())
    simulate_allocator([replace(records[0], took_s=3.5)], WAY, hardware=hardware())
    simulate_allocator(records, replace(WAY, micro_batch_size=2), hardware=hardware())
    simulate_allocator(records, WAY, hardware=hardware(memory_gib=24))
    assert simulations.made == 4


def test_without_logs_nothing_is_kept(tmp_path: Path, simulations: Simulations) -> None:
    simulations.reserved_bytes = None
    for log in (None, tmp_path / "gone.jsonl"):
        for _ in range(2):
            simulate_allocator(traces(log), WAY, hardware=hardware())
    assert simulations.made == 4
    assert not list(tmp_path.iterdir())
