"""The request of a profile and the facts of each rank: the files in the profile folder."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from torchmuster import untrusted
from torchmuster.errors import MusterError

REQUEST_FILE = "profile.json"
WARM_UP_STEPS = 3  # allocate memory, build DDP buckets and see the dtypes; not in the facts
Kind = Literal["workers", "batch", "buckets", "threads", "bf16", "saves"]
CHANGES: Mapping[Kind, str] = {
    "workers": "{} loader workers",
    "batch": "{} times the batch",
    "buckets": "gradients sent in buckets of {} MiB",
    "threads": "torch.set_num_threads({})",
    "bf16": "bf16 autocast",
    "saves": "only every {}th save",
}
SMALL_S = 20e-6  # launching a PyTorch operation takes some microseconds on the host
_LAUNCH_BOUND_FROM = 0.5  # share of a host's time in small operations
_IDLE_FROM = 0.2  # share of a device's step
_ENOUGH_RUNS = 3
_CLEAR_FROM = 1.1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that the recorder applies inside the training's process; the script stays as it is."""

    kind: Kind
    value: int = 1

    def __str__(self) -> str:
        return CHANGES[self.kind].format(self.value)

    @property
    def written(self) -> str:
        """The change in JSON and in the page: ``workers=4``."""
        return f"{self.kind}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds per step without and with a change, from alternating fresh processes.

    Each value is the median step of the slowest rank of one run. ``samples_factor`` is the increase
    of samples per step.
    """

    change: Change
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    samples_factor: float = 1.0

    @property
    def gain(self) -> float:
        """The factor in samples/s with the change."""
        before_s = statistics.median(self.before_s)
        return before_s / statistics.median(self.after_s) * self.samples_factor

    @property
    def low(self) -> float:
        """The gain between the best run without and the worst run with the change.

        Of three runs the slowest does not count: other load only slows runs down.
        """
        after_s = sorted(self.after_s)
        if len(after_s) >= _ENOUGH_RUNS:
            after_s.pop()
        return min(self.before_s) / after_s[-1] * self.samples_factor

    @property
    def is_unclear(self) -> bool:
        """Whether the best runs differ but others do not: a run may have been disturbed."""
        best = min(self.before_s) / min(self.after_s) * self.samples_factor
        return best >= _CLEAR_FROM and self.low <= 1.0


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
    """The host's time breakdown of one step: from the end of one ``optimizer.step`` to the next."""

    number: int
    profiled: bool
    took_s: float
    data_s: float = 0.0  # waiting for the loader
    forward_s: float = 0.0  # in the outermost modules
    backward_s: float = 0.0
    waiting_s: float = 0.0  # of backward: after the last gradient was ready
    communication_s: float = 0.0  # in calls of torch.distributed by the script
    optimizer_s: float = 0.0
    save_s: float = 0.0
    saves: int = 0
    reads_s: float = 0.0  # in .item(), .tolist(), .cpu(), .numpy()
    reads: int = 0
    micro_batches: int = 0

    @property
    def other_s(self) -> float:
        """The time outside of all phases."""
        passes_s = self.forward_s + self.backward_s + self.optimizer_s
        rest_s = self.data_s + self.communication_s + self.save_s + self.reads_s
        return max(0.0, self.took_s - passes_s - rest_s)

    @property
    def waited_s(self) -> float:
        """How long the rank waited for communication that nothing overlapped."""
        return self.waiting_s + self.communication_s

    def own_s(self, phase: str) -> float:
        """Return the time of a phase without waiting for other ranks."""
        seconds = float(getattr(self, f"{phase}_s"))
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
    calls: float = 0.0
    median_s: float = 0.0
    small_part: float = 0.0  # of the time, in operations shorter than SMALL_S

    @property
    def launch_bound(self) -> bool:
        """Whether a step is limited by how fast operations can be launched."""
        if not self.shares:
            return self.small_part >= _LAUNCH_BOUND_FROM
        idle = self.shares.get("idle", 0.0) / sum(self.shares.values())
        return self.median_s < SMALL_S and idle >= _IDLE_FROM


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
    autocast: str | None
    strategy: Literal["ddp", "fsdp"] | None
    bucket_bytes: int | None  # DDP's cap of one message
    trace: Trace | None
    notes: tuple[str, ...] = ()
    change_unused: bool = False  # the training does not use what the change would change

    @property
    def on_device(self) -> bool:
        """Whether the trace has a device's timeline."""
        return self.trace is not None and bool(self.trace.shares)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The results of trial runs, and of ``--verify``."""

    trials: tuple[Trial, ...] = ()
    proof: Trial | None = None


def read_facts(folder: Path) -> list[RankFacts]:
    """Return the facts of all ranks in a profile's folder, by rank."""
    facts = [read_json(path, RankFacts) for path in folder.glob("rank-*.facts.json")]
    if not facts:
        raise MusterError(
            f"no profile in {folder}",
            why="it contains no file rank-N.facts.json",
            fix="pass a folder written by muster profile",
        )
    return sorted(facts, key=lambda rank: rank.rank)


def read_json(path: Path, kind: type[T]) -> T:
    """Read one file of a profile's folder."""
    try:
        return untrusted.read_typed(path, msgspec.json.Decoder(kind).decode)
    except (untrusted.Unreadable, OSError) as error:
        raise MusterError(
            f"cannot read {path}",
            why=str(error),
            fix="pass a folder written by muster profile, or profile again",
        ) from error
