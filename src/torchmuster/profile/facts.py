"""The request of a profile and the facts of each rank: plain values, sent as JSON."""

from dataclasses import dataclass, field
from typing import Literal

WARM_UP_STEPS = 3  # allocate memory, build DDP buckets and see the dtypes; not in the facts
# What a change does, with its value.
CHANGES = {
    "workers": "{} loader workers",
    "batch": "{} times the batch",
    "buckets": "gradients sent in buckets of {} MiB",
    "threads": "torch.set_num_threads({})",
    "bf16": "bf16 autocast",
    "saves": "only every {}th save",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that ``--verify`` applies inside the training's process; the script stays as it is."""

    kind: Literal["workers", "batch", "buckets", "threads", "bf16", "saves"]
    value: int = 1

    def __str__(self) -> str:
        return CHANGES[self.kind].format(self.value)


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """The request to the recorder: training, steps and output folder."""

    command: tuple[str, ...]  # the script, or a module with ``module``, and its own arguments
    module: bool = False
    folder: str  # working directory of the training
    ranks: int
    device: Literal["cpu", "gpu"]
    first_step: int  # steps are counted from 1
    last_step: int
    change: Change | None = None
    traces: bool = True  # False: facts only, for trials
    with_run_folder: bool = False  # the command gets a run folder inside ``into``
    into: str = ""  # the profile's folder


@dataclass(frozen=True, kw_only=True)
class Step:
    """The host's time of one step by phase: from the end of one ``optimizer.step`` to the next.

    The phases are ``data`` (waiting for the loader), ``forward`` (in the outermost modules),
    ``backward``, ``communication`` (in calls of torch.distributed by the script), ``optimizer``,
    ``save``, and ``reads`` (in .item(), .tolist(), .cpu(), .numpy()).
    """

    number: int
    profiled: bool
    took_s: float
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    times: dict[str, int] = field(default_factory=dict)  # how often each phase was entered
    waiting_s: float = 0.0  # of backward: after the last gradient was ready

    @property
    def waited_s(self) -> float:
        """How long the rank waited for communication that nothing overlapped."""
        return self.waiting_s + self.seconds.get("communication", 0.0)

    def own_s(self, phase: str) -> float:
        """Return the time of a phase without waiting for other ranks; ``other`` is outside of all."""
        if phase == "other":
            return max(0.0, self.took_s - sum(self.seconds.values()))
        seconds = self.seconds.get(phase, 0.0)
        return seconds - self.waiting_s if phase == "backward" else seconds


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The DataLoader that the steps read from."""

    workers: int
    samples_per_batch: int | None  # as the batches themselves show
    dataset: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of operation: a device kernel, or a host operation without its children."""

    name: str
    calls: float  # per step
    self_s: float  # per step


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What the profiler's events show, per step."""

    steps: int
    shares: dict[str, float] = field(default_factory=dict)  # of a device: seconds by share
    sent_s: tuple[float, ...] = ()  # of a device: in collectives, by step
    messages: float = 0.0  # collectives
    top: tuple[Operation, ...] = ()  # by time


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts of one rank."""

    rank: int
    host: str
    device: str
    device_name: str
    cores: int  # that the process may use
    ranks_here: int  # on this host
    threads: int
    steps: tuple[Step, ...]
    loader: Loader | None
    parameter_dtypes: dict[str, int]  # elements by type
    gradient_bytes: int
    autocast: str | None  # the 16-bit dtype of computation, if any
    strategy: Literal["ddp", "fsdp"] | None
    bucket_bytes: int | None  # DDP's cap of one message
    trace: Trace | None
    notes: tuple[str, ...] = ()
    change_unused: bool = False  # the training does not use what the change would change

    @property
    def on_device(self) -> bool:
        """Whether the trace has a device's timeline."""
        return self.trace is not None and bool(self.trace.shares)
