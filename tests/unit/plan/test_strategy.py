"""A copy on each rank or shards: by states where they decide, by a trace in between, by states if that fails."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.decision import Decision
from torchmuster.plan import strategy
from torchmuster.plan.job import Work
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.strategy import Name, Question, strategy_for
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.units import GiB

GREY = Question(
    work=Work(build="own:model", dataset="own:data"),
    ranks=4,
    ranks_per_machine=4,
    states_bytes=6 * GiB,
    memory_bytes=10 * GiB,
    device="cuda",
    precision="bf16",
    recompute="none",
    micro_batch_size=8,
    accumulation=2,
)
BY_STATES: Decision[Name] = Decision(value="ddp", reason="ddp: the states fit")


def never(requests: Sequence[TraceRequest]) -> list[TraceRefused]:
    raise AssertionError("traced without need")


@pytest.mark.parametrize("states_gib", [0.1, 2.5, 9.1, 40])
def test_states_that_decide_need_no_trace(states_gib: float) -> None:
    clear = replace(GREY, states_bytes=int(states_gib * GiB))
    decided = strategy_for(clear, BY_STATES, never)
    assert (decided.value.name, decided.reason) == ("ddp", "ddp: the states fit")
    assert decided.value.promise is None


def test_what_cannot_be_traced_is_decided_by_states(snapshot: SnapshotAssertion) -> None:
    def look(requests: Sequence[TraceRequest]) -> list[TraceRefused]:
        return [TraceRefused(what="tracing took too long and was stopped")] * len(requests)

    decided = strategy_for(GREY, BY_STATES, look)
    assert decided.value.name == "ddp"
    assert decided.reason == snapshot


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a trace say what a copy takes."""

    def say(total_gib: float, high_gib: float) -> None:
        needed = SimpleNamespace(
            total_bytes=int(total_gib * GiB),
            high_bytes=int(high_gib * GiB),
            tensor_bytes=int(total_gib * GiB) - GiB,
        )
        monkeypatch.setattr(strategy, "_needed", lambda question, look: needed)

    return say


def test_a_copy_that_fits_is_ddp_and_a_promise(traced: Any, snapshot: SnapshotAssertion) -> None:
    traced(8.5, 9.9)
    decided = strategy_for(GREY, Decision(value="fsdp", reason="fsdp: no"), never)
    assert decided.value.name == "ddp"
    assert decided.reason == snapshot
    promise = decided.value.promise
    assert promise is not None
    assert promise.tensor_bytes == int(7.5 * GiB)
    assert promise.candidate == GREY.copies
    assert (GREY.copies.layout.copies, GREY.copies.accumulation) == (4, 2)


def test_a_copy_that_may_not_fit_is_sharded(traced: Any, snapshot: SnapshotAssertion) -> None:
    traced(9.5, 10.5)
    decided = strategy_for(GREY, BY_STATES, never)
    assert decided.value.name == "fsdp"
    assert decided.reason == snapshot
