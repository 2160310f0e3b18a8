"""Collectives with known results, so that a single wrong value is detected.

All values are integers small enough to be exact in float32 in any summation order. Each rank's
values differ from those of all others, so a missing, stale or swapped part is detected too.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.in_time import ProbeHeartbeat, RankBarrier
from torchmuster.diagnose.rank_record import Operation, Values

_PATTERN_TURNS = 64  # the values repeat after this many turns
_SMALL = 2**8  # 1 KiB
_LARGE = {"cpu": 2**20}  # 4 MiB
_LARGE_ON_GPU = 2**23  # 32 MiB
_SMALL_TURNS = 3
# One wrong value in a million is hardest to find in a sum: 12 turns of a million values find it.
_MOST_TURNS = {"all-reduce": 12}
_MOST_TURNS_OTHERS = 3
_BUDGET_S = 1.0
# How long a rank may make no progress. NCCL connects when an algorithm is first used, which may take 40 s.
_SILENT_S = {"cpu": 8.0}
_SILENT_ON_GPU_S = 50.0

# The source rank (None for a sum over all ranks), the received and the expected values.
Piece = tuple[int | None, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank in the tested group: the default group if ``group`` is None."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None


def exact_numbers(rank: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return what a rank contributes in a turn: small integers that differ from turn to turn."""
    return _pattern(count, device) + (turn % _PATTERN_TURNS + rank + 1)


def exact_sums(world_size: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return the sum of the contributions of all ranks; exact up to 4,000 ranks."""
    constant = world_size * (turn % _PATTERN_TURNS) + world_size * (world_size + 1) // 2
    return torch.add(
        torch.full((), float(constant), device=device), _pattern(count, device), alpha=world_size
    )


@functools.lru_cache(maxsize=4)
def _pattern(count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int64, device=device)
    return (places * 7 % 997).to(torch.float32)


def forget_groups() -> None:
    """Free the device memory that is cached between turns."""
    _pattern.cache_clear()


def all_reduce(seat: Seat, count: int, turn: int) -> list[Piece]:
    """Every rank receives the sum over all ranks."""
    got = exact_numbers(seat.rank, count, turn, seat.device)
    dist.all_reduce(got, group=seat.group)
    return [(None, got, exact_sums(seat.world_size, count, turn, seat.device))]


def reduce_scatter(seat: Seat, count: int, turn: int) -> list[Piece]:
    """Every rank receives its own part of the sum."""
    own = max(1, count // seat.world_size)
    whole = exact_numbers(seat.rank, own * seat.world_size, turn, seat.device)
    got = torch.zeros(own, device=seat.device)
    dist.reduce_scatter(got, list(whole.view(-1, own).unbind()), group=seat.group)
    expected = exact_sums(seat.world_size, own * seat.world_size, turn, seat.device)
    return [(None, got, expected[seat.rank * own : (seat.rank + 1) * own])]


def broadcast(seat: Seat, count: int, turn: int) -> list[Piece]:
    """Every rank receives the values of one rank, which changes every turn."""
    root = turn % seat.world_size
    got = torch.zeros(count, device=seat.device)
    if seat.rank == root:
        got = exact_numbers(root, count, turn, seat.device)
    dist.broadcast(got, root, group=seat.group)
    return [(root, got, exact_numbers(root, count, turn, seat.device))]


def all_gather(seat: Seat, count: int, turn: int) -> list[Piece]:
    """Every rank receives a part from every rank."""
    each = max(1, count // seat.world_size)
    mine = exact_numbers(seat.rank, each, turn, seat.device)
    got = [torch.zeros(each, device=seat.device) for _ in range(seat.world_size)]
    dist.all_gather(got, mine, group=seat.group)
    pieces: list[Piece] = []
    for rank, part in enumerate(got):
        pieces.append((rank, part, exact_numbers(rank, each, turn, seat.device)))
    return pieces


def all_to_all(seat: Seat, count: int, turn: int) -> list[Piece]:
    """Every rank receives its part from every rank."""
    each = max(1, count // seat.world_size)
    mine = exact_numbers(seat.rank, each * seat.world_size, turn, seat.device)
    got = torch.zeros_like(mine)
    dist.all_to_all_single(got, mine, group=seat.group)
    here = slice(seat.rank * each, (seat.rank + 1) * each)
    pieces: list[Piece] = []
    for rank, part in enumerate(got.view(-1, each).unbind()):
        sent = exact_numbers(rank, each * seat.world_size, turn, seat.device)
        pieces.append((rank, part, sent[here]))
    return pieces


Collective = Callable[[Seat, int, int], list[Piece]]
OPERATIONS: dict[str, Collective] = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
}


def compare_values(got: torch.Tensor, expected: torch.Tensor) -> Values:
    """Compare two tensors value by value."""
    differ = got != expected  # also true for NaN
    wrong = int(differ.sum())
    if not wrong:
        return Values(compared=got.numel())
    place = int(differ.flatten().to(torch.uint8).argmax())
    return Values(
        compared=got.numel(),
        wrong=wrong,
        place=place,
        got=float(got.flatten()[place]),
        expected=float(expected.flatten()[place]),
    )


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has finished its work; no-op on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def silent_s(device: torch.device) -> float:
    """Return how long a rank may make no progress before it counts as hanging."""
    return _SILENT_S.get(device.type, _SILENT_ON_GPU_S)


def large_count(device: torch.device) -> int:
    """Return the number of values of a large transfer."""
    return _LARGE.get(device.type, _LARGE_ON_GPU)


def check_collectives(seat: Seat, together: RankBarrier) -> tuple[Operation, ...]:
    """Run every collective with small and large values; slower groups run fewer large turns."""
    operations = []
    for name, collective in OPERATIONS.items():
        turns = _Turns(collective, seat, together.heartbeat)
        for _ in range(_SMALL_TURNS):
            turns.run(_SMALL)
        large_s = turns.run(large_count(seat.device))
        # All ranks must make the same number of calls, so the slowest rank decides.
        slowest_s = max(together.share(f"{name} large", large_s, silent_s(seat.device)))
        most = _MOST_TURNS.get(name, _MOST_TURNS_OTHERS)
        for _ in range(min(most, int(_BUDGET_S / slowest_s)) - 1):
            turns.run(large_count(seat.device))
        operations.append(Operation(name=name, values=turns.values, wrong_from=turns.wrong_from))
    return tuple(operations)


class _Turns:
    """Runs the turns of one collective and accumulates their values."""

    def __init__(self, collective: Collective, seat: Seat, heartbeat: ProbeHeartbeat) -> None:
        self._collective = collective
        self._seat = seat
        self._heartbeat = heartbeat
        self._turn = 0
        self.values = Values()
        self.wrong_from: dict[int, int] = {}

    def run(self, count: int) -> float:
        """Run it once with ``count`` values and compare them; return the seconds."""
        began = time.perf_counter()
        pieces = self._collective(self._seat, count, self._turn)
        self._turn += 1
        for source, got, expected in pieces:
            compared = compare_values(got, expected)
            self.values += compared
            if source is not None and compared.wrong:
                self.wrong_from[source] = self.wrong_from.get(source, 0) + compared.wrong
        self._heartbeat.beat()
        return time.perf_counter() - began


def sum_again(seat: Seat, heartbeat: ProbeHeartbeat) -> Values:
    """Repeat an all-reduce in a small group, and compare its values."""
    turns = _Turns(all_reduce, seat, heartbeat)
    for _ in range(_MOST_TURNS["all-reduce"]):
        turns.run(large_count(seat.device))
    return turns.values
