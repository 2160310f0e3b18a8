"""Profiles of trainings that never ran: facts of ranks, and events of the profiler, from a few figures."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torchmuster.profile.facts import Loader, RankFacts, Step, Trace

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


def step(number: int, *, profiled: bool = False, **told: Any) -> Step:
    """Return a step of a healthy training with differences; it is as long as its phases are."""
    phases = {**HEALTHY, **told}
    seconds = {name.removesuffix("_s"): phases.get(name, 0.0) for name in _PHASES}
    times = {"save": phases.get("saves", 0), "reads": phases.get("reads", 0)}
    return Step(
        number=number,
        profiled=profiled,
        took_s=phases.get("took_s") or sum(seconds.values()) + 0.001,
        seconds=seconds,
        times={**times, "backward": phases.get("micro_batches", 1)},
        waiting_s=phases["waiting_s"],
    )


def rank(number: int = 0, *, ranks: int = 2, steps: Sequence[Step] = (), **told: Any) -> RankFacts:
    """Return the facts of a rank; without steps, ten healthy ones."""
    facts: dict[str, Any] = {
        "rank": number,
        "host": "vm",
        "device": "cpu",
        "device_name": "a processor",
        "cores": 2,
        "ranks_here": ranks,
        "threads": 1,
        "steps": tuple(steps) or tuple(step(at) for at in range(3, 13)),
        "loader": Loader(workers=0, samples_per_batch=64, dataset="Samples"),
        "parameter_dtypes": {"float32": 4_000_000},
        "gradient_bytes": 24 * 2**20,
        "autocast": None,
        "strategy": "ddp",
        "bucket_bytes": 25 * 2**20,
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


def trace(**told: Any) -> Trace:
    """Return what a trace of one step shows."""
    return Trace(**{"steps": 1, **told})


def event(name: str, begin: float, length: float, *, thread: int = 1, **more: Any) -> Any:
    """Return an operation as ``profile.events()`` has it, in microseconds."""
    span = SimpleNamespace(start=begin, end=begin + length, elapsed_us=lambda: length)
    facts = {
        "device_type": SimpleNamespace(name="CPU"),
        "is_user_annotation": False,
        "self_cpu_time_total": length,
    }
    return SimpleNamespace(name=name, thread=thread, time_range=span, **{**facts, **more})


def mark(name: str, begin: float, length: float, *, thread: int = 1, **more: Any) -> Any:
    """Return a range that the recorder, or PyTorch, has marked."""
    return event(name, begin, length, thread=thread, is_user_annotation=True, **more)


def kernel(name: str, begin: float, length: float, **more: Any) -> Any:
    """Return what a device did."""
    return event(name, begin, length, thread=7, device_type=SimpleNamespace(name="CUDA"), **more)
