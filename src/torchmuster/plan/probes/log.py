"""What is written down while a training is followed: storages, operations, collectives and stages, in order."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchmuster.plan.probes.stages import Stage
from torchmuster.plan.record import Collective


class Sized(NamedTuple):
    """A storage has another size from here on: taken, given back, or resized."""

    number: int
    size_bytes: int
    operation: str
    module: str


class Done(NamedTuple):
    """An operation that was computed."""

    name: str
    dtype: str
    flops: int
    moved_bytes: int
    made_bytes: int
    recomputed: bool


Event = Sized | Done | Collective | Stage


@dataclass(slots=True)
class Storage:
    """What is known of a storage."""

    made_in: Stage
    stream: Literal["compute", "gather", "reduce"] = "compute"
    collective: bool = False  # it is there for a collective
    recomputed: bool = False  # made while a forward was computed again


@dataclass(slots=True)
class Log:
    """What happened, in order."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)  # by number
