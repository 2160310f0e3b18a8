"""What a trial is asked to do, and what each of its ranks records, as lines of JSON.

A hash is equal if and only if the values are bitwise equal. Nothing here depends on torch.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

How = Literal["kill-all", "kill-rank", "sigterm", "in-save"]
EventKind = Literal["save", "load", "worker", "loader", "end"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Stop a trial once ``after_step`` steps are done: before the next one, or in the save that follows them."""

    after_step: int
    how: How
    in_micro_batch: int = 0  # of the next step


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """One launch of the script."""

    name: str
    command: tuple[str, ...]
    module: bool
    with_run_folder: bool  # muster train
    folder: str  # the copy of the working folder
    into: str  # for the records
    ranks: int
    device: Literal["cpu", "gpu"]
    steps: int  # exit after this many
    most_steps: int = 0  # if more: go on until a checkpoint was saved, at most so far
    stop: StopRequest | None = None
    dropout: bool = True


class MicroBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One forward of the model in training."""

    inputs: str
    samples: list[str] = []
    loss: float | None = None
    # (loader, its iteration, position in it), each from 0; None if no DataLoader is known.
    place: tuple[int, int, int] | None = None


class StepRecord(msgspec.Struct, kw_only=True, tag="step", omit_defaults=True):
    """One optimizer step of one rank. ``*_before`` are recorded in the first step of a process."""

    step: int
    micro_batches: list[MicroBatch]
    rng: dict[str, str] = {}  # before the first forward
    buffers: str = ""  # before the first forward, once DDP has broadcast them
    learning_rates: list[float] = []
    settings: str = ""  # the other settings of the optimizer
    gradients: str = ""
    replicated_square: float = 0.0  # of the gradient norm
    sharded_square: float = 0.0
    unclipped_norm: float | None = None
    scale: float | None = None
    state: dict[str, str] = {}  # of the optimizer, by name
    weights: list[str] = []  # by parameter
    weights_norm: float = 0.0
    copies: list[str] = []  # of the weights, such as an average (EMA)
    evaluated: bool = False  # before the next step
    weights_before: list[str] | None = None
    state_before: dict[str, str] | None = None


class ParametersRecord(msgspec.Struct, kw_only=True, tag="parameters"):
    """The trained parameters, in the order of ``StepRecord.weights``."""

    names: list[str]
    sharded: list[bool]
    dtype: str
    layers: list[
        str
    ]  # classes of layers that make a result depend on the batch or on random numbers


class EventRecord(msgspec.Struct, kw_only=True, tag="event", omit_defaults=True):
    """Something that happened after ``step`` steps; ``line`` is where in the script, as ``train.py:12``."""

    kind: EventKind
    step: int
    path: str = ""
    library: str = ""
    line: str = ""
    keys: list[str] = []
    shuffles: bool = False  # of a loader
    values: dict[str, str] = {}


Line = StepRecord | ParametersRecord | EventRecord


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Everything that one rank recorded."""

    rank: int
    parameters: ParametersRecord | None
    steps: list[StepRecord]
    events: list[EventRecord]

    def of_kind(self, kind: EventKind) -> list[EventRecord]:
        """Return the events of a kind."""
        return [event for event in self.events if event.kind == kind]

    def line_of(self, kind: EventKind) -> str:
        """Return where in the script the last event of a kind happened; "" if unknown."""
        return next((event.line for event in reversed(self.of_kind(kind)) if event.line), "")


@dataclass(frozen=True)
class TrialRecord:
    """The records of all ranks of a trial, and why it failed, if it did."""

    ranks: list[RankRecord]
    trouble: str = ""
    saves: list[EventRecord] = field(default_factory=list)  # complete checkpoints, oldest first

    @cached_property
    def steps(self) -> int:
        """The number of steps that all ranks made."""
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def up_to(self, steps: int) -> "TrialRecord":
        """Return the record without what happened after this many steps."""
        ranks = []
        for rank in self.ranks:
            events = [event for event in rank.events if event.step <= steps]
            ranks.append(replace(rank, steps=rank.steps[:steps], events=events))
        saves = [save for save in self.saves if save.step <= steps]
        return TrialRecord(ranks=ranks, trouble=self.trouble, saves=saves)

    def loss(self, step: int) -> float | None:
        """Return the mean of the losses of a step (from 0), over ranks and micro-batches."""
        losses = [
            batch.loss
            for rank in self.ranks
            for batch in rank.steps[step].micro_batches
            if batch.loss is not None
        ]
        return sum(losses) / len(losses) if losses else None

    def gradient_norm(self, step: int) -> float:
        """Return the gradient norm of a step over all ranks, before clipping if that is known."""
        first = self.ranks[0].steps[step]
        if first.unclipped_norm is not None:
            return first.unclipped_norm
        sharded = sum(rank.steps[step].sharded_square for rank in self.ranks)
        return float((first.replicated_square + sharded) ** 0.5)

    def samples(self, step: int) -> list[str]:
        """Return the samples of a step, over all ranks and micro-batches."""
        return [
            sample
            for rank in self.ranks
            for batch in rank.steps[step].micro_batches
            for sample in batch.samples
        ]


def file_of(into: Path, rank: int) -> Path:
    """Return the file in which a rank records."""
    return into / f"rank-{rank}.jsonl"


def read_rank(into: Path, rank: int) -> RankRecord:
    """Read what a rank recorded; a line cut off by a kill is left out."""
    lines: list[Line] = []
    decoder = msgspec.json.Decoder(Line)
    own = file_of(into, rank)
    for path in (own, own.with_suffix(".workers.jsonl")):
        for text in path.read_bytes().splitlines() if path.exists() else ():
            try:
                lines.append(decoder.decode(text))
            except msgspec.MsgspecError:
                break
    return RankRecord(
        rank=rank,
        parameters=next(
            (line for line in reversed(lines) if isinstance(line, ParametersRecord)), None
        ),
        steps=[line for line in lines if isinstance(line, StepRecord)],
        events=[line for line in lines if isinstance(line, EventRecord)],
    )


def read_ranks(into: Path, ranks: int) -> list[RankRecord]:
    """Read what all ranks of a trial recorded."""
    return [read_rank(into, rank) for rank in range(ranks)]
