"""Profiles of trainings that never ran: facts of ranks, and traces, from a few figures."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmuster.bench.profile.recording import RankFacts, RecordedLoader, RecordedStep

HEALTHY: Mapping[str, float] = {
    "data_s": 0.001,
    "forward_s": 0.020,
    "backward_s": 0.042,
    "waiting_s": 0.004,
    "optimizer_s": 0.003,
}
_PHASES = (
    "data_s",
    "forward_s",
    "backward_s",
    "communication_s",
    "optimizer_s",
    "save_s",
    "reads_s",
)


def step(number: int, *, profiled: bool = False, **told: Any) -> RecordedStep:
    """Return a step of a healthy training with differences; it is as long as its phases are."""
    phases = {**HEALTHY, **told}
    took_s = phases.pop("took_s", None) or sum(phases.get(name, 0.0) for name in _PHASES) + 0.001
    return RecordedStep(
        number=number,
        profiled=profiled,
        begun_at_s=float(number),
        took_s=took_s,
        micro_batches=phases.pop("micro_batches", 1),
        **phases,
    )


def rank(
    number: int = 0, *, ranks: int = 2, steps: Sequence[RecordedStep] = (), **told: Any
) -> RankFacts:
    """Return the facts of a rank; without steps, ten healthy ones."""
    facts: dict[str, Any] = {
        "rank": number,
        "ranks": ranks,
        "host": "vm",
        "device": "cpu",
        "device_name": "a processor",
        "cores": 2,
        "ranks_here": ranks,
        "threads": 1,
        "interop_threads": 1,
        "epoch_minus_monotonic_s": 0.0,
        "steps": tuple(steps) or tuple(step(at) for at in range(3, 13)),
        "loader": RecordedLoader(
            workers=0,
            batch_size=64,
            samples_per_batch=64,
            pin_memory=False,
            prefetch_factor=None,
            dataset="Samples",
        ),
        "parameters": 4_000_000,
        "parameter_bytes": 16_000_000,
        "parameter_dtypes": {"float32": 4_000_000},
        "gradient_bytes": 24 * 2**20,
        "autocast": None,
        "spread": "ddp",
        "bucket_bytes": 25 * 2**20,
        "optimizer": "SGD",
        "flops_per_step": 10**9,
        "trace": None,
    }
    return RankFacts(**{**facts, **told})


def ranks(*phases: Mapping[str, Any], steps: int = 10, **told: Any) -> list[RankFacts]:
    """Return ranks in lockstep, each with its phases; whoever is early waits in its backward for the last."""
    own = [{**HEALTHY, **one} for one in phases]
    lengths = [
        sum(one.get(name, 0.0) for name in _PHASES) + one.get("waiting_s", 0.0) * -1 for one in own
    ]
    found = []
    for at, one in enumerate(own):
        late_s = max(lengths) - lengths[at]
        waits = {"waiting_s": one["waiting_s"] + late_s, "backward_s": one["backward_s"] + late_s}
        made = [step(number, **{**one, **waits}) for number in range(3, 3 + steps)]
        found.append(rank(at, ranks=len(phases), steps=made, **told))
    return found


def event(
    name: str, begin: float, length: float, *, cat: str = "cpu_op", thread: int = 1, **more: Any
) -> dict[str, Any]:
    """Return an event of a trace, in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": 1000.0 + begin,
        "dur": length,
        **more,
    }


def mark(name: str, begin: float, length: float, *, thread: int = 1) -> dict[str, Any]:
    """Return a range that the recorder, or PyTorch, has marked."""
    return event(name, begin, length, cat="user_annotation", thread=thread)


def write_trace(path: Path, events: Sequence[Mapping[str, Any]], **header: Any) -> Path:
    """Write a trace as the profiler does; packed if its name says so."""
    text = json.dumps(
        {"schemaVersion": 1, **header, "traceEvents": list(events), "traceName": "t"}, indent=1
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
