"""The point-to-point stage: correctness, latency and bandwidth between pairs of ranks."""

import itertools
import math
import time
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import (
    Seat,
    compare_values,
    exact_numbers,
    sum_again,
    wait_for_device,
)
from torchmuster.diagnose.probes.in_time import ProbeHeartbeat, RankBarrier
from torchmuster.diagnose.rank_record import Pair, Values
from torchmuster.diagnose.rounds import collective_links, disjoint

_ALL_PAIRS_UP_TO = 9  # ranks; in larger groups, only the pairs that collectives use
_BLOCK = {"cpu": 2**18}  # 1 MiB
_BLOCK_ON_GPU = 2**24  # 64 MiB
_BLOCKS = 3  # the best counts, as other processes may interfere


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
                pairs[peer] = _exchange(seat, peer, together.heartbeat)
    neighbours = [link for link in links if link[1] - link[0] in (1, seat.world_size - 1)]
    for link in neighbours if sums else ():
        group = dist.new_group(list(link))  # all ranks create all groups, in the same order
        if seat.rank in link:
            place = link.index(seat.rank)
            inside = replace(seat, rank=place, world_size=2, group=group)
            values = sum_again(inside, together.heartbeat)
            peer = link[1 - place]
            pairs[peer] = msgspec.structs.replace(pairs[peer], sums=values)
        together.heartbeat.beat()
    return tuple(pairs[peer] for peer in sorted(pairs))


def _exchange(seat: Seat, peer: int, heartbeat: ProbeHeartbeat) -> Pair:
    """Exchange blocks; the lower rank sends first."""
    ping = torch.zeros(1, device=seat.device)
    _to_and_fro(seat, peer, ping, ping)  # opens the connection
    count = _BLOCK.get(seat.device.type, _BLOCK_ON_GPU)
    values, best_s = Values(), math.inf
    for turn in range(_BLOCKS):
        mine = exact_numbers(seat.rank, count, turn, seat.device)
        got = torch.zeros(count, device=seat.device)
        best_s = min(best_s, _to_and_fro(seat, peer, mine, got))
        values += compare_values(got, exact_numbers(peer, count, turn, seat.device))
        heartbeat.beat()
    return Pair(peer=peer, values=values, bytes_per_s=2 * count * 4 / best_s)


def _to_and_fro(seat: Seat, peer: int, mine: torch.Tensor, got: torch.Tensor) -> float:
    """Send and receive; return the seconds for both."""
    wait_for_device(seat.device)
    began = time.perf_counter()
    if seat.rank < peer:
        dist.send(mine, peer)
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        dist.send(mine, peer)
    wait_for_device(seat.device)
    return time.perf_counter() - began
