"""The point-to-point stage: correctness, latency and bandwidth between pairs of ranks."""

import itertools
import time
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import (
    Seat,
    compare_values,
    connecting,
    exact_numbers,
    sum_again,
    wait_for_device,
)
from torchmuster.diagnose.probes.in_time import RankBarrier
from torchmuster.diagnose.rank_record import Pair, Values
from torchmuster.diagnose.rounds import collective_links, disjoint

_ALL_PAIRS_UP_TO = 9  # ranks; in larger groups, only the pairs that collectives use
_BLOCK = {"cpu": 2**18}  # 1 MiB
_BLOCK_ON_GPU = 2**24  # 64 MiB
_BLOCKS = 4  # the best counts, as other processes may interfere
_SLOW_BLOCK_S = 0.4  # a pair that takes longer for one block sends no more of them


def measure_pairs(seat: Seat, together: RankBarrier, *, sums: bool = False) -> tuple[Pair, ...]:
    """Exchange values between all pairs of ranks (in a large group: some), in disjoint rounds.

    With ``sums``, neighbours also repeat an all-reduce, which shows who corrupts sums.
    """
    links = collective_links(seat.world_size)
    if seat.world_size <= _ALL_PAIRS_UP_TO:
        links = list(itertools.combinations(range(seat.world_size), 2))
    pairs = {}
    for disjoint_links in disjoint(links):
        for low, high in disjoint_links:
            if seat.rank in (low, high):
                peer = high if seat.rank == low else low
                with connecting(seat.device, together.heartbeat):
                    pairs[peer] = _exchange(seat, peer)
                together.heartbeat.beat()
    neighbours = [link for link in links if link[1] - link[0] in (1, seat.world_size - 1)]
    for link in neighbours if sums else ():
        with connecting(seat.device, together.heartbeat):
            group = dist.new_group(list(link))  # all ranks create all groups, in the same order
        if seat.rank in link:
            place = link.index(seat.rank)
            inside = replace(seat, rank=place, world_size=2, group=group)
            values = sum_again(inside, together.heartbeat)
            peer = link[1 - place]
            pairs[peer] = msgspec.structs.replace(pairs[peer], sums=values)
        together.heartbeat.beat()
    return tuple(pairs[peer] for peer in sorted(pairs))


def _exchange(seat: Seat, peer: int) -> Pair:
    """Exchange blocks; the lower rank sends first and decides how many."""
    first = seat.rank < peer
    ping = torch.zeros(1, device=seat.device)
    _to_and_fro(seat, peer, ping, ping, first)  # opens the connection
    count = _BLOCK.get(seat.device.type, _BLOCK_ON_GPU)
    values, best_s = _block(seat, peer, count, 0, first)
    more = torch.full((1,), float(_BLOCKS - 1 if best_s < _SLOW_BLOCK_S else 0), device=seat.device)
    if first:
        dist.send(more, peer)
    else:
        dist.recv(more, peer)
    for turn in range(1, 1 + min(int(more), _BLOCKS)):
        compared, seconds = _block(seat, peer, count, turn, first)
        values, best_s = values + compared, min(best_s, seconds)
    return Pair(peer=peer, values=values, bytes_per_s=2 * count * 4 / best_s)


def _block(seat: Seat, peer: int, count: int, turn: int, first: bool) -> tuple[Values, float]:
    mine = exact_numbers(seat.rank, count, turn, seat.device)
    got = torch.zeros(count, device=seat.device)
    seconds = _to_and_fro(seat, peer, mine, got, first)
    return compare_values(got, exact_numbers(peer, count, turn, seat.device)), seconds


def _to_and_fro(seat: Seat, peer: int, mine: torch.Tensor, got: torch.Tensor, first: bool) -> float:
    """Send and receive; return the seconds for both."""
    wait_for_device(seat.device)
    began = time.perf_counter()
    if first:
        dist.send(mine, peer)
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        dist.send(mine, peer)
    wait_for_device(seat.device)
    return time.perf_counter() - began
