"""Collectives with known results, so that a single wrong value is detected.

All values are integers small enough to be exact in float32 in any summation order. Each rank's
values differ from those of all others, so a missing, stale or swapped part is detected too.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.in_time import ProbeHeartbeat, RankBarrier
from torchmuster.diagnose.rank_record import Operation, Values

_TURNS = 64  # the values repeat after this many turns

# The source rank (None for a sum over all ranks), the received and the expected values.
Piece = tuple[int | None, torch.Tensor, torch.Tensor]
_SMALL = 2**8  # 1 KiB
_MIDDLE = 2**14  # 64 KiB
_LARGE = {"cpu": 2**20}  # 4 MiB
_LARGE_ON_GPU = 2**23  # 32 MiB
_SMALL_TURNS = 3
_MIDDLE_TURNS = 2
# One wrong value in a million is hardest to find in a sum: 12 turns of a million values find it.
_MOST_TURNS = {"all-reduce": 12}
_MOST_TURNS_OTHERS = 3
_BUDGET_S = 1.0
_TOO_SLOW_S = 1.5  # for one large turn
_WAIT_S = 10.0
CONNECT_S = 40.0  # less than the limit of the group, at which torch ends the process
_BEAT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank in the tested group: the default group if ``group`` is None."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None


# The call of a prepared collective, and the pieces that it fills.
Prepared = tuple[Callable[[], object], Callable[[], Iterator[Piece]]]


def exact_numbers(rank: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return what a rank contributes in a turn: small integers that differ from turn to turn."""
    return _pattern(count, device) + (turn % _TURNS + rank + 1)


def exact_sums(world_size: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return the sum of the contributions of all ranks; exact up to 4,000 ranks."""
    constant = world_size * (turn % _TURNS) + world_size * (world_size + 1) // 2
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


def all_reduce(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare an all-reduce: every rank receives the sum over all ranks."""
    got = exact_numbers(seat.rank, count, turn, seat.device)

    def pieces() -> Iterator[Piece]:
        yield None, got, exact_sums(seat.world_size, count, turn, seat.device)

    return lambda: dist.all_reduce(got, group=seat.group), pieces


def reduce_scatter(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare a reduce-scatter: every rank receives its own part of the sum."""
    own = max(1, count // seat.world_size)
    whole = exact_numbers(seat.rank, own * seat.world_size, turn, seat.device)
    got = torch.zeros(own, device=seat.device)

    def pieces() -> Iterator[Piece]:
        expected = exact_sums(seat.world_size, own * seat.world_size, turn, seat.device)
        yield None, got, expected[seat.rank * own : (seat.rank + 1) * own]

    return lambda: dist.reduce_scatter(
        got, list(whole.view(-1, own).unbind()), group=seat.group
    ), pieces


def broadcast(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare a broadcast: every rank receives the values of one rank, which changes every turn."""
    root = turn % seat.world_size
    got = torch.zeros(count, device=seat.device)
    if seat.rank == root:
        got = exact_numbers(root, count, turn, seat.device)

    def pieces() -> Iterator[Piece]:
        yield root, got, exact_numbers(root, count, turn, seat.device)

    return lambda: dist.broadcast(got, root, group=seat.group), pieces


def all_gather(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare an all-gather: every rank receives a part from every rank."""
    each = max(1, count // seat.world_size)
    mine = exact_numbers(seat.rank, each, turn, seat.device)
    got = [torch.zeros(each, device=seat.device) for _ in range(seat.world_size)]

    def pieces() -> Iterator[Piece]:
        for rank, piece in enumerate(got):
            yield rank, piece, exact_numbers(rank, each, turn, seat.device)

    return lambda: dist.all_gather(got, mine, group=seat.group), pieces


def all_to_all(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare an all-to-all: every rank receives its part from every rank."""
    each = max(1, count // seat.world_size)
    mine = exact_numbers(seat.rank, each * seat.world_size, turn, seat.device)
    got = torch.zeros_like(mine)

    def pieces() -> Iterator[Piece]:
        here = slice(seat.rank * each, (seat.rank + 1) * each)
        for rank, piece in enumerate(got.view(-1, each).unbind()):
            yield rank, piece, exact_numbers(rank, each * seat.world_size, turn, seat.device)[here]

    return lambda: dist.all_to_all_single(got, mine, group=seat.group), pieces


OPERATIONS: dict[str, Callable[[Seat, int, int], Prepared]] = {
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


@contextmanager
def connecting(device: torch.device, heartbeat: ProbeHeartbeat) -> Iterator[None]:
    """Let a first call take up to ``CONNECT_S`` on GPUs: NCCL connects when an algorithm is first used."""
    done = threading.Event()

    def beat() -> None:
        for _ in range(int(CONNECT_S / _BEAT_S)):
            if done.wait(_BEAT_S):
                return
            heartbeat.beat()

    if device.type == "cpu":
        yield
        return
    beating = threading.Thread(target=beat, name="connecting", daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join()


def _wait_s(seat: Seat) -> float:
    """Return how long to wait for ranks that may connect meanwhile."""
    return _WAIT_S if seat.device.type == "cpu" else _WAIT_S + CONNECT_S


def check_collectives(seat: Seat, together: RankBarrier) -> tuple[Operation, ...]:
    """Run every collective; slower groups run fewer large turns."""
    return tuple(_run(name, prepare, seat, together) for name, prepare in OPERATIONS.items())


def _run(
    name: str, prepare: Callable[[Seat, int, int], Prepared], seat: Seat, together: RankBarrier
) -> Operation:
    count = _Count(prepare, seat, together.heartbeat)
    small_s = min(count.turn(_SMALL) for _ in range(_SMALL_TURNS))
    large = _LARGE.get(seat.device.type, _LARGE_ON_GPU)
    # All ranks must make the same number of calls, so the slowest rank decides.
    middle_s = min(count.turn(_MIDDLE) for _ in range(_MIDDLE_TURNS)) - small_s
    slowest_s = max(together.share(f"{name} middle", middle_s, _wait_s(seat)))
    if slowest_s * large / _MIDDLE > _TOO_SLOW_S:
        large = _MIDDLE
    large_s = count.turn(large)
    slowest_s = max(together.share(f"{name} large", large_s, _wait_s(seat)))
    most = _MOST_TURNS.get(name, _MOST_TURNS_OTHERS)
    for _ in range(min(most, int(_BUDGET_S / max(slowest_s, 1e-6))) - 1):
        count.turn(large)
    return Operation(name=name, values=count.values, wrong_from=count.wrong_from)


class _Count:
    """Runs the turns of one collective and accumulates their values."""

    def __init__(
        self, prepare: Callable[[Seat, int, int], Prepared], seat: Seat, heartbeat: ProbeHeartbeat
    ) -> None:
        self._prepare = prepare
        self._seat = seat
        self._heartbeat = heartbeat
        self._turns = 0
        self._sizes: set[int] = set()  # of earlier turns; NCCL's algorithm depends on the size
        self.values = Values()
        self.wrong_from: dict[int, int] = {}

    def turn(self, count: int) -> float:
        """Run it once with ``count`` values and compare them; return the duration of the call."""
        call, pieces = self._prepare(self._seat, count, self._turns)
        self._turns += 1
        new = count not in self._sizes
        self._sizes.add(count)
        with connecting(self._seat.device, self._heartbeat) if new else nullcontext():
            wait_for_device(self._seat.device)
            began = time.perf_counter()
            call()
            wait_for_device(self._seat.device)
            seconds = time.perf_counter() - began
        self._heartbeat.beat()
        for source, got, expected in pieces():
            compared = compare_values(got, expected)
            self.values += compared
            if source is not None and compared.wrong:
                self.wrong_from[source] = self.wrong_from.get(source, 0) + compared.wrong
        return seconds


def sum_again(seat: Seat, heartbeat: ProbeHeartbeat) -> Values:
    """Repeat an all-reduce in a small group, and compare its values."""
    count = _Count(all_reduce, seat, heartbeat)
    for _ in range(_MOST_TURNS["all-reduce"]):
        count.turn(_LARGE.get(seat.device.type, _LARGE_ON_GPU))
    return count.values
