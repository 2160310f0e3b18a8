"""What a trial is asked to do, and what each of its ranks records, as lines of JSON.

A hash is equal if and only if the values are bitwise equal. Nothing here depends on torch.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

StopName = Literal["killed", "rank-killed", "terminated", "save-killed"]
EventKind = Literal["save", "worker", "loader"]


@dataclass(frozen=True, kw_only=True)
class PlannedStop:
    """Stop a trial once ``after_step`` steps are done: before the next one, or in the save that follows them."""

    name: StopName
    after_step: int
    in_micro_batch: int = 0  # of the next step


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """One launch of the script."""

    command: tuple[str, ...]
    module: bool
    with_run_folder: bool  # muster train
    folder: str  # the copy of the working folder
    into: str  # for the records
    ranks: int
    device: Literal["cpu", "gpu"]
    steps: int  # exit after this many
    most_steps: int = 0  # if more: go on until a checkpoint was saved, at most so far
    stop: PlannedStop | None = None
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class ProofRequest(TrialRequest):
    """What to prove of which script: the first run in the user's folder, ``into`` the folder of the report."""

    only: tuple[str, ...]  # properties, or single checks, such as resume.killed
    allowed: tuple[str, ...] = ()  # kinds of differences
    other_ranks: tuple[int, ...] = ()
    resume_with: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    batch_argument: str = ""
    accumulation_argument: str = ""

    @property
    def script(self) -> str:
        """The name of the script."""
        return self.command[0] if self.module else Path(self.command[0]).name

    def wants(self, check: str) -> bool:
        """Return whether a check, such as ``resume.killed``, is requested, or its whole property."""
        return check in self.only or check.partition(".")[0] in self.only


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
    weights_before: list[str] | None = None
    state_before: dict[str, str] | None = None

    @property
    def squared_gradients(self) -> float:
        """The squared norm of the gradients that this rank has."""
        return self.replicated_square + self.sharded_square


class ParametersRecord(msgspec.Struct, kw_only=True, tag="parameters"):
    """The trained parameters, in the order of ``StepRecord.weights``."""

    names: list[str]
    sharded: list[bool]
    dtype: str
    layers: list[str]  # classes of layers whose result depends on the samples of one rank


class EventRecord(msgspec.Struct, kw_only=True, tag="event", omit_defaults=True):
    """Something that happened after ``step`` steps; ``line`` is where in the script, as ``train.py:12``.

    A save, the first use of a loader, or the start of a worker in iteration ``step`` of its loader.
    """

    kind: EventKind
    step: int
    path: str = ""
    library: str = ""
    line: str = ""
    keys: list[str] = []  # of the checkpoint
    loader: int = 0  # in the order of their first use
    shuffles: bool = False
    random: dict[str, str] = {}  # the states with which a worker begins, by generator


Line = StepRecord | ParametersRecord | EventRecord
_LINE = msgspec.json.Decoder(Line)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Everything that one rank recorded."""

    rank: int
    parameters: ParametersRecord | None
    steps: list[StepRecord]
    events: list[EventRecord]

    def micro_batches(self) -> list[MicroBatch]:
        """Return the micro-batches of all steps."""
        batches: list[MicroBatch] = []
        for step in self.steps:
            batches += step.micro_batches
        return batches

    def of_kind(self, kind: EventKind) -> list[EventRecord]:
        """Return the events of a kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def loader_line(self) -> str:
        """Where in the script the last loader is first read; "" if unknown."""
        lines = [event.line for event in self.of_kind("loader") if event.line]
        return "".join(lines[-1:])


@dataclass(frozen=True)
class TrialRecord:
    """The records of all ranks of a trial, and why it failed, if it did."""

    ranks: list[RankRecord]
    trouble: str = ""
    saves: list[EventRecord] = field(default_factory=list)  # complete checkpoints, oldest first

    @property
    def steps(self) -> int:
        """The number of steps that all ranks made."""
        return min(len(rank.steps) for rank in self.ranks)

    @property
    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        return max((save.step for save in self.saves), default=0)

    def up_to(self, steps: int) -> "TrialRecord":
        """Return the record without what happened after this many steps."""
        ranks = []
        for rank in self.ranks:
            events = [event for event in rank.events if event.step <= steps]
            ranks.append(replace(rank, steps=rank.steps[:steps], events=events))
        saves = [save for save in self.saves if save.step <= steps]
        return TrialRecord(ranks=ranks, trouble=self.trouble, saves=saves)

    def loss(self, step: int) -> float | None:
        """Return the mean of the losses of a step, over ranks and micro-batches."""
        losses = []
        for rank in self.ranks:
            for batch in rank.steps[step].micro_batches:
                if batch.loss is not None:
                    losses.append(batch.loss)
        if not losses:
            return None
        return sum(losses) / len(losses)

    def gradient_norm(self, step: int) -> float:
        """Return the gradient norm of a step over all ranks, before clipping if that is known."""
        first = self.ranks[0].steps[step]
        if first.unclipped_norm is not None:
            return first.unclipped_norm
        sharded = sum(rank.steps[step].sharded_square for rank in self.ranks)
        return float((first.replicated_square + sharded) ** 0.5)

    def samples(self, step: int) -> Counter[str]:
        """Return how often each sample is in a step, over all ranks and micro-batches."""
        samples: Counter[str] = Counter()
        for rank in self.ranks:
            for batch in rank.steps[step].micro_batches:
                samples.update(batch.samples)
        return samples


@dataclass(frozen=True, kw_only=True)
class ResumeTrial:
    """A run that was stopped, and its continuation."""

    stop: PlannedStop
    stopped: TrialRecord
    resumed: TrialRecord


def file_of(into: Path, rank: int) -> Path:
    """Return the file in which a rank records."""
    return into / f"rank-{rank}.jsonl"


def read_ranks(into: Path, ranks: int) -> list[RankRecord]:
    """Read what all ranks of a trial recorded."""
    return [_read_rank(into, rank) for rank in range(ranks)]


def _read_rank(into: Path, rank: int) -> RankRecord:
    """Read what a rank recorded; a line cut off by a kill is left out."""
    record = RankRecord(rank=rank, parameters=None, steps=[], events=[])
    file = file_of(into, rank)
    for path in (file, file.with_suffix(".workers.jsonl")):
        if not path.exists():
            continue
        for text in path.read_bytes().splitlines():
            try:
                line = _LINE.decode(text)
            except msgspec.MsgspecError:
                break
            match line:
                case StepRecord():
                    record.steps.append(line)
                case EventRecord():
                    record.events.append(line)
                case ParametersRecord():
                    record = replace(record, parameters=line)
    return record
