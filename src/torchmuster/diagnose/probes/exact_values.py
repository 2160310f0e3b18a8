"""Collectives whose every value is known beforehand, so that a single wrong one is seen.

All numbers are whole and small enough to be exact in 32-bit floats in any order of adding up. Each
rank's differ from all others', so a part that is missing, old or another rank's is wrong too.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchmuster.diagnose.rank_record import Values

_TURNS = 64  # after so many the numbers come again

# What arrived, what it must be, and the rank it came from; None for a sum over all ranks.
Piece = tuple[int | None, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank in the group that is tested: the default group if ``group`` is None."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None


# Puts a collective's data in place, and returns the call and the pieces that it fills.
Prepared = tuple[Callable[[], object], Callable[[], Iterator[Piece]]]


def numbers(rank: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return what a rank contributes in a turn: small whole numbers, others in the next turn."""
    return _pattern(count, device) + (turn % _TURNS + rank + 1)


def sums(world_size: int, count: int, turn: int, device: torch.device) -> torch.Tensor:
    """Return what the contributions of all ranks add up to; exact up to 4,000 ranks."""
    constant = world_size * (turn % _TURNS) + world_size * (world_size + 1) // 2
    return torch.add(
        torch.full((), float(constant), device=device), _pattern(count, device), alpha=world_size
    )


@functools.lru_cache(maxsize=4)
def _pattern(count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int64, device=device)
    return (places * 7 % 997).to(torch.float32)


def forget() -> None:
    """Give back the device memory that is kept between turns."""
    _pattern.cache_clear()


def all_reduce(seat: Seat, count: int, turn: int) -> Prepared:
    """Everybody gets the sum over all ranks."""
    got = numbers(seat.rank, count, turn, seat.device)

    def pieces() -> Iterator[Piece]:
        yield None, got, sums(seat.world_size, count, turn, seat.device)

    return lambda: dist.all_reduce(got, group=seat.group), pieces


def reduce_scatter(seat: Seat, count: int, turn: int) -> Prepared:
    """Everybody gets its own part of the sum."""
    own = max(1, count // seat.world_size)
    whole = numbers(seat.rank, own * seat.world_size, turn, seat.device)
    got = torch.zeros(own, device=seat.device)

    def pieces() -> Iterator[Piece]:
        expected = sums(seat.world_size, own * seat.world_size, turn, seat.device)
        yield None, got, expected[seat.rank * own : (seat.rank + 1) * own]

    return lambda: dist.reduce_scatter(
        got, list(whole.view(-1, own).unbind()), group=seat.group
    ), pieces


def broadcast(seat: Seat, count: int, turn: int) -> Prepared:
    """Everybody gets the numbers of one rank, of another one in each turn."""
    root = turn % seat.world_size
    got = torch.zeros(count, device=seat.device)
    if seat.rank == root:
        got = numbers(root, count, turn, seat.device)

    def pieces() -> Iterator[Piece]:
        yield root, got, numbers(root, count, turn, seat.device)

    return lambda: dist.broadcast(got, root, group=seat.group), pieces


def all_gather(seat: Seat, count: int, turn: int) -> Prepared:
    """Everybody gets a part from every rank."""
    each = max(1, count // seat.world_size)
    mine = numbers(seat.rank, each, turn, seat.device)
    got = [torch.zeros(each, device=seat.device) for _ in range(seat.world_size)]

    def pieces() -> Iterator[Piece]:
        for rank, piece in enumerate(got):
            yield rank, piece, numbers(rank, each, turn, seat.device)

    return lambda: dist.all_gather(got, mine, group=seat.group), pieces


def all_to_all(seat: Seat, count: int, turn: int) -> Prepared:
    """Everybody gets from every rank the part that is meant for it."""
    each = max(1, count // seat.world_size)
    mine = numbers(seat.rank, each * seat.world_size, turn, seat.device)
    got = torch.zeros_like(mine)

    def pieces() -> Iterator[Piece]:
        here = slice(seat.rank * each, (seat.rank + 1) * each)
        for rank, piece in enumerate(got.view(-1, each).unbind()):
            yield rank, piece, numbers(rank, each * seat.world_size, turn, seat.device)[here]

    return lambda: dist.all_to_all_single(got, mine, group=seat.group), pieces


OPERATIONS: dict[str, Callable[[Seat, int, int], Prepared]] = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
}


def compare(got: torch.Tensor, expected: torch.Tensor) -> Values:
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
    """Wait until a GPU has done what it was told; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
