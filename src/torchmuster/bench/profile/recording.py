"""The request of a profile and the facts of each rank: the files in the profile folder.

Timestamps (``*_at_s``) are of the host's monotonic clock, which all ranks of one host share;
``epoch_minus_monotonic_s`` converts them to Unix time.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster import untrusted
from torchmuster.bench.profile.changes import TriedChange
from torchmuster.errors import MusterError

ASKED = "profile.json"
WARM_UP_STEPS = 3  # allocate memory, build DDP buckets and count FLOPs; not in the facts


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
    on_ranks: tuple[int, ...] | None = None  # ranks whose traces are saved; None: all
    trace_most_bytes: int = 256 * 1024**2  # of one rank's trace before compression
    with_memory: bool = False
    changes: tuple[TriedChange, ...] = ()
    traces: bool = True  # False: facts only, for trials
    with_run_folder: bool = False  # the command gets a run folder inside ``into``
    into: str = ""  # the profile's folder


@dataclass(frozen=True, kw_only=True)
class RecordedCollective:
    """A call of torch.distributed by the script itself."""

    name: str
    begun_at_s: float
    ended_at_s: float
    size_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The host's time breakdown of one step: from the end of one ``optimizer.step`` to the next."""

    number: int
    profiled: bool
    begun_at_s: float
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
    data_ended_at_s: float | None = None
    forward_begun_at_s: float | None = None
    backward_begun_at_s: float | None = None
    gradients_ready_at_s: float | None = None
    backward_ended_at_s: float | None = None
    cpu_s: float = 0.0  # of all threads of the process
    switches: int = 0  # involuntary context switches
    memory_bytes: int | None = None  # the device's peak so far; on the CPU the process's memory
    collectives: tuple[RecordedCollective, ...] = ()

    @property
    def other_s(self) -> float:
        """The time outside of all phases."""
        named = self.data_s + self.forward_s + self.backward_s + self.communication_s
        return max(0.0, self.took_s - named - self.optimizer_s - self.save_s - self.reads_s)


@dataclass(frozen=True, kw_only=True)
class RecordedLoader:
    """The DataLoader that the steps read from."""

    workers: int
    batch_size: int | None
    samples_per_batch: int | None  # as the batches themselves show
    pin_memory: bool
    prefetch_factor: int | None
    dataset: str


@dataclass(frozen=True, kw_only=True)
class TraceKept:
    """The Chrome trace of a rank and its steps; ``why_cut`` if fewer than requested."""

    file: str
    size_bytes: int
    first_step: int
    last_step: int
    why_cut: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts of one rank."""

    rank: int
    ranks: int
    host: str
    device: str
    device_name: str
    cores: int  # that the process may use
    ranks_here: int  # on this host
    threads: int
    interop_threads: int
    epoch_minus_monotonic_s: float
    steps: tuple[RecordedStep, ...]
    loader: RecordedLoader | None
    parameters: int
    parameter_bytes: int
    parameter_dtypes: dict[str, int]  # elements by type
    gradient_bytes: int
    autocast: str | None
    spread: Literal["ddp", "fsdp"] | None
    bucket_bytes: int | None  # DDP's cap of one message
    optimizer: str
    flops_per_step: int | None
    trace: TraceKept | None
    changes: tuple[TriedChange, ...] = ()
    trouble: tuple[str, ...] = field(default=())


def write_facts(folder: Path, facts: RankFacts) -> None:
    """Write a rank's facts next to its trace."""
    (folder / f"rank-{facts.rank}.facts.json").write_bytes(msgspec.json.encode(facts))


def read_facts(folder: Path) -> list[RankFacts]:
    """Return the facts of all ranks in a profile's folder, by rank."""
    found = []
    for path in folder.glob("rank-*.facts.json"):
        try:
            found.append(untrusted.read_typed(path, msgspec.json.Decoder(RankFacts).decode))
        except (untrusted.Unreadable, OSError) as error:
            raise MusterError(
                f"cannot read the facts of a rank in {path}",
                why=str(error),
                fix="profile again: muster profile",
            ) from error
    if not found:
        raise MusterError(
            f"no profile in {folder}",
            why="it contains no file rank-N.facts.json",
            fix="pass a folder written by muster profile",
        )
    return sorted(found, key=lambda one: one.rank)
