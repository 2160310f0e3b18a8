"""The stage in which all ranks run each collective, small and large, and compare every value."""

import time
from collections.abc import Callable

import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import (
    OPERATIONS,
    Prepared,
    Seat,
    all_reduce,
    compare,
    wait_for_device,
)
from torchmuster.diagnose.probes.together import Pulse, Together
from torchmuster.diagnose.rank_record import Operation, Values

_SMALL = 2**8  # 1 KiB
_MIDDLE = 2**14  # 64 KiB
_LARGE = {"cpu": 2**20}  # 4 MiB
_LARGE_ON_GPU = 2**23  # 32 MiB
_SMALL_TURNS = 3
_MIDDLE_TURNS = 2
# A sum is where one wrong value in a million hides best: 12 turns of a million values find it.
_MOST_TURNS = {"all-reduce": 12}
_MOST_TURNS_OTHERS = 3
_BUDGET_S = 1.0
_TOO_SLOW_S = 1.5  # for one large turn
_WAIT_S = 10.0


def run_all(seat: Seat, together: Together) -> tuple[Operation, ...]:
    """Run every collective; the slower the group, the fewer turns of large ones."""
    return tuple(_run(name, prepare, seat, together) for name, prepare in OPERATIONS.items())


def _run(
    name: str, prepare: Callable[[Seat, int, int], Prepared], seat: Seat, together: Together
) -> Operation:
    count = _Count(prepare, seat, together.pulse)
    small_s = min(count.turn(_SMALL) for _ in range(_SMALL_TURNS))
    large = _LARGE.get(seat.device.type, _LARGE_ON_GPU)
    # All ranks must make the same number of calls, so they decide by the slowest of them.
    more_s = min(count.turn(_MIDDLE) for _ in range(_MIDDLE_TURNS)) - small_s
    middle_s = max(together.share(f"{name} middle", more_s, _WAIT_S))
    if middle_s * large / _MIDDLE > _TOO_SLOW_S:
        large = _MIDDLE
    large_s = count.turn(large)
    slowest_s = max(together.share(f"{name} large", large_s, _WAIT_S))
    most = _MOST_TURNS.get(name, _MOST_TURNS_OTHERS)
    for _ in range(min(most, int(_BUDGET_S / max(slowest_s, 1e-6))) - 1):
        large_s = min(large_s, count.turn(large))
    return Operation(
        name=name,
        values=count.values,
        wrong_from=count.wrong_from,
        small_bytes=_SMALL * 4,
        small_s=small_s,
        large_bytes=large * 4,
        large_s=large_s,
    )


class _Count:
    """The turns of one collective and what they came to."""

    def __init__(
        self, prepare: Callable[[Seat, int, int], Prepared], seat: Seat, pulse: Pulse
    ) -> None:
        self._prepare = prepare
        self._seat = seat
        self._pulse = pulse
        self._turns = 0
        self.values = Values()
        self.wrong_from: dict[int, int] = {}

    def turn(self, count: int) -> float:
        """Run it once with so many numbers and compare them; return how long the call took."""
        call, pieces = self._prepare(self._seat, count, self._turns)
        self._turns += 1
        wait_for_device(self._seat.device)
        began = time.perf_counter()
        call()
        wait_for_device(self._seat.device)
        seconds = time.perf_counter() - began
        self._pulse.beat()
        for source, got, expected in pieces():
            compared = compare(got, expected)
            self.values += compared
            if source is not None and compared.wrong:
                self.wrong_from[source] = self.wrong_from.get(source, 0) + compared.wrong
        return seconds


def find_suspects(seat: Seat, together: Together) -> tuple[tuple[int, ...], ...]:
    """Return the smallest groups of ranks whose sum is wrong, by halving the group again and again.

    A rank that spoils what it adds spoils every group it is in, down to that of itself alone. Where
    only two together are wrong, it is what lies between them.
    """
    groups = [tuple(range(seat.world_size))]
    smallest: list[tuple[int, ...]] = []
    level = 0
    while groups:
        halves = {whole: _halves(whole) for whole in groups if len(whole) > 1}
        smallest += [whole for whole in groups if len(whole) == 1]
        wrong = _wrong_groups(
            [half for pair in halves.values() for half in pair], seat, together, level
        )
        smallest += [whole for whole, pair in halves.items() if not set(pair) & set(wrong)]
        groups, level = wrong, level + 1
    return tuple(sorted(smallest))


def _halves(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    middle = len(ranks) // 2
    return ranks[:middle], ranks[middle:]


def _wrong_groups(
    groups: list[tuple[int, ...]], seat: Seat, together: Together, level: int
) -> list[tuple[int, ...]]:
    """Let each of these groups add up its numbers by itself; return those that got a wrong sum."""
    seen_wrong = False
    for ranks in groups:
        group = dist.new_group(list(ranks))  # all ranks must make all groups, in the same order
        if seat.rank not in ranks:
            continue
        inside = Seat(
            rank=ranks.index(seat.rank),
            world_size=len(ranks),
            device=seat.device,
            group=group,
        )
        count = _Count(all_reduce, inside, together.pulse)
        for _ in range(_MOST_TURNS["all-reduce"]):
            count.turn(_LARGE.get(seat.device.type, _LARGE_ON_GPU))
        seen_wrong = count.values.wrong > 0
    said = together.share(f"suspects {level}", seen_wrong, _WAIT_S)
    return [ranks for ranks in groups if any(said[rank] for rank in ranks)]
