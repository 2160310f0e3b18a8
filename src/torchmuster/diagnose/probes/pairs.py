"""The point-to-point stage: correctness, latency and bandwidth between pairs of ranks."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import (
    CONNECT_S,
    Seat,
    compare_values,
    connecting,
    exact_numbers,
    wait_for_device,
)
from torchmuster.diagnose.probes.in_time import RankBarrier
from torchmuster.diagnose.rank_record import Pair, Values
from torchmuster.diagnose.rounds import collective_rounds, rounds_for

_ALL_PAIRS_UP_TO = 9  # ranks; in larger groups, only the pairs that collectives use
_PINGS = 12
_BLOCK = {"cpu": 2**18}  # 1 MiB
_BLOCK_ON_GPU = 2**24  # 64 MiB
_BLOCKS = 3
_SLOW_BLOCK_S = 0.4  # a pair that takes longer for one block sends no more of them
_SUSPICIOUS = 0.35  # of the median: measured again, since a busy host may be the cause
_TRIES_AGAIN = 2
_WAIT_S = 10.0


def measure_pairs(seat: Seat, hosts: list[str], together: RankBarrier) -> tuple[Pair, ...]:
    """Exchange values between all pairs of ranks (in a large group: some), in disjoint rounds."""
    few = seat.world_size <= _ALL_PAIRS_UP_TO
    rounds = (rounds_for if few else collective_rounds)(seat.world_size)
    found: dict[int, Pair] = {}
    for again in range(1 + _TRIES_AGAIN):
        for pairs in rounds:
            for low, high in pairs:
                if seat.rank in (low, high):
                    peer = high if seat.rank == low else low
                    with connecting(seat.device, together.heartbeat):
                        found[peer] = _better(_exchange(seat, peer), found.get(peer))
                    together.heartbeat.beat()
        speeds = {peer: pair.bytes_per_s for peer, pair in found.items()}
        with connecting(seat.device, together.heartbeat):
            within_s = _WAIT_S if seat.device.type == "cpu" else CONNECT_S
            table = together.share(f"pairs {again}", speeds, within_s)
        slow = slow_pairs(table, hosts)
        rounds = [[pair for pair in pairs if pair in slow] for pairs in rounds]
        if not slow:
            break
    return tuple(found[peer] for peer in sorted(found))


def slow_pairs(table: list[dict[str, Any]], hosts: list[str]) -> set[tuple[int, int]]:
    """Return the pairs far below the median of their kind: within one host, or between two."""
    speeds: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for rank, row in enumerate(table):
        for peer, speed in row.items():
            if rank < int(peer) and speed:
                inside = hosts[rank] == hosts[int(peer)]
                speeds[inside][rank, int(peer)] = speed
    slow = set()
    for kind in speeds.values():
        if kind:
            least = _SUSPICIOUS * statistics.median(kind.values())
            slow |= {pair for pair, speed in kind.items() if speed < least}
    return slow


def _better(new: Pair, old: Pair | None) -> Pair:
    if old is None:
        return new
    return Pair(
        peer=new.peer,
        values=old.values + new.values,
        latency_s=min(old.latency_s or 0.0, new.latency_s or 0.0),
        bytes_per_s=max(old.bytes_per_s or 0.0, new.bytes_per_s or 0.0),
    )


def _exchange(seat: Seat, peer: int) -> Pair:
    """Ping, then exchange blocks; the lower rank sends first and decides how many."""
    first = seat.rank < peer
    ping = torch.zeros(1, device=seat.device)
    _to_and_fro(seat, peer, ping, ping, first)  # opens the connection
    latency_s = min(_to_and_fro(seat, peer, ping, ping, first) for _ in range(_PINGS)) / 2
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
    return Pair(peer=peer, values=values, latency_s=latency_s, bytes_per_s=2 * count * 4 / best_s)


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
