"""The record that a rank of the collectives probe prints, and its parser.

A rank prints its record as a line of its output after each stage; the last one counts. So the
output of a killed rank still shows which stage it reached.
"""

from collections.abc import Iterable

import msgspec

MARK = "torchmuster-probe: "


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank could not continue.

    ``problem`` is absent (others did not reach the stage), hangs (it did not finish in time) or
    error. ``ranks`` are the ranks it waited for, as far as known.
    """

    stage: str
    problem: str
    ranks: tuple[int, ...] = ()
    text: str = ""


class Values(msgspec.Struct, frozen=True, kw_only=True):
    """How many values were compared with the expected ones, how many were wrong, and the first."""

    compared: int = 0
    wrong: int = 0
    place: int | None = None
    got: float | None = None
    expected: float | None = None

    def __add__(self, other: "Values") -> "Values":
        first = self if self.wrong else other
        return Values(
            compared=self.compared + other.compared,
            wrong=self.wrong + other.wrong,
            place=first.place,
            got=first.got,
            expected=first.expected,
        )


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective: its values, and the ranks whose parts were wrong.

    The values of a sum come from all ranks, so ``wrong_from`` is empty.
    """

    name: str
    values: Values
    wrong_from: dict[int, int] = {}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The exchange with another rank: ``values`` are the values that arrived here.

    ``sums`` are those of an all-reduce of the two, made only if a sum over all ranks was wrong.
    """

    peer: int
    values: Values
    sums: Values = Values()
    bytes_per_s: float | None = None


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products on the rank's device in one dtype: the best speed, and the values."""

    precision: str
    flops_per_s: float
    values: Values


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The device's temperature and throttling under load."""

    temperature_c: int | None = None
    throttled_by: tuple[str, ...] = ()


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Stages it did not reach are None or empty; ``ended`` is False until it finishes."""

    rank: int
    world_size: int
    host: str
    node: int | None = None  # the place of its host in the group
    local_rank: int | None = None
    device: str = ""  # cpu, cuda:0
    device_name: str = ""
    device_uuid: str | None = None
    backend: str = ""
    backend_reason: str = ""
    hip: bool = False  # its torch is for AMD GPUs
    accelerator: str | None = None  # available to torch, whether or not it is used
    gpu_error: str = ""  # why torch does not use GPUs here
    stage: str = "start"
    matmuls: tuple[Matmul, ...] = ()
    health: Health | None = None
    operations: tuple[Operation, ...] = ()
    pairs: tuple[Pair, ...] = ()
    trouble: Trouble | None = None
    ended: bool = False

    @property
    def matmul_values(self) -> Values:
        """The values of all its matrix products."""
        return sum((matmul.values for matmul in self.matmuls), start=Values())

    @property
    def where(self) -> str:
        """The name used in findings: ``node2, GPU 1 (rank 9)``."""
        kind, _, number = self.device.partition(":")
        device = f"GPU {number}" if number else (kind.upper() or "CPU")
        return f"{self.host}, {device} (rank {self.rank})"


def line_of(record: RankRecord) -> str:
    """Return a record as the line that a rank prints."""
    return MARK + msgspec.json.encode(record).decode()


def records_from(lines: Iterable[str]) -> list[RankRecord]:
    """Return the last record of each rank, ordered by rank; ignore lines that are not records."""
    last: dict[int, RankRecord] = {}
    for line in lines:
        _, mark, text = line.partition(MARK)
        if not mark:
            continue
        try:
            record = msgspec.json.decode(text, type=RankRecord)
        except (msgspec.MsgspecError, RecursionError):  # truncated, or from another program
            continue
        last[record.rank] = record
    return [last[rank] for rank in sorted(last)]
