"""What a profile is asked for, and what each rank writes down of itself: the words of the profile's folder.

Times at which something happened (``*_at_s``) are of the machine's monotonic clock, which all ranks of one machine share;
``epoch_minus_monotonic_s`` makes a date of them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster.bench.profile.changes import TriedChange
from torchmuster.errors import MusterError

ASKED = "profile.json"
WARM_UP_STEPS = 3  # in which memory is first taken, DDP makes its buckets and flops are counted; not in the facts


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What the recorder is told: which training, which of its steps, and where to write."""

    command: tuple[str, ...]  # the script, or a module with ``module``, and its own arguments
    module: bool = False
    folder: str  # where the training runs
    ranks: int
    device: Literal["cpu", "gpu"]
    first_step: int  # steps are counted from 1
    last_step: int
    on_ranks: tuple[int, ...] | None = None  # whose traces are kept; None: all
    trace_most_bytes: int = 256 * 1024**2  # of one rank's trace before it is packed
    with_memory: bool = False
    changes: tuple[TriedChange, ...] = ()
    traces: bool = True  # False: facts only, as trials need them
    with_run_folder: bool = False  # the command is told a run folder inside ``into``
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
    """Where the time of one step went, as the host saw it: from the end of one ``optimizer.step`` to the next."""

    number: int
    profiled: bool
    begun_at_s: float
    took_s: float
    data_s: float = 0.0  # waiting for the loader
    forward_s: float = 0.0  # in the outermost modules
    backward_s: float = 0.0
    waiting_s: float = 0.0  # of backward: after the last gradient was there
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
    switches: int = 0  # that the process did not want: others took its cores
    memory_bytes: int | None = None  # the device's peak so far; on the CPU what the process holds
    collectives: tuple[RecordedCollective, ...] = ()

    @property
    def other_s(self) -> float:
        """What none of the phases had."""
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
    """The Chrome trace of a rank, and which steps it holds; ``why_cut`` where they are fewer than asked for."""

    file: str
    size_bytes: int
    first_step: int
    last_step: int
    why_cut: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank saw of itself."""

    rank: int
    ranks: int
    host: str
    device: str
    device_name: str
    cores: int  # that the process may use
    ranks_here: int  # on this machine
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
    """Write a rank's facts beside its trace."""
    (folder / f"rank-{facts.rank}.facts.json").write_bytes(msgspec.json.encode(facts))


def read_facts(folder: Path) -> list[RankFacts]:
    """Return the facts of all ranks in a profile's folder, by rank."""
    found = []
    for path in folder.glob("rank-*.facts.json"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=RankFacts))
        except (msgspec.MsgspecError, OSError) as error:
            raise MusterError(
                f"{path} cannot be read as what a rank wrote down",
                why=str(error),
                fix="profile again: muster profile",
            ) from error
    if not found:
        raise MusterError(
            f"there is no profile in {folder}",
            why="no file rank-N.facts.json is there",
            fix="name a folder that muster profile has written",
        )
    return sorted(found, key=lambda one: one.rank)
