"""The caching allocator, as PyTorch has it: rules one by one, and what must always hold."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import OutOfMemory
from torchmuster.plan.memory.allocator import CachingAllocator, Kind, simulate
from torchmuster.plan.record import Allocation
from torchmuster.units import MiB

KINDS: tuple[Kind, ...] = ("expandable", "classic")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size_bytes", "live", "classic", "expandable"),
    [
        (1, 512, 2 * MiB, 2 * MiB),
        (513, 1024, 2 * MiB, 2 * MiB),
        (MiB, MiB, 2 * MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB, 20 * MiB),
        (31 * MiB, 32 * MiB, 32 * MiB, 40 * MiB),  # up to 1 MiB too much is not cut off
    ],
)
def test_what_the_device_is_asked_for(
    kind: Kind, size_bytes: int, live: int, classic: int, expandable: int
) -> None:
    allocator = CachingAllocator(kind)
    allocator.take(0, size_bytes)
    assert allocator.reserved_bytes == (classic if kind == "classic" else expandable)
    if not (kind == "expandable" and size_bytes == 31 * MiB):
        assert allocator.live_bytes == live


def test_nothing_takes_nothing() -> None:
    allocator = CachingAllocator()
    allocator.take(0, 0)
    allocator.give(0)
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_given_back_is_used_again_on_its_own_stream_only(kind: Kind) -> None:
    allocator = CachingAllocator(kind)
    allocator.take(0, 40 * MiB, "compute")
    allocator.give(0)
    allocator.take(1, 40 * MiB, "compute")
    assert allocator.reserved_bytes == 40 * MiB
    allocator.give(1)
    allocator.take(2, 40 * MiB, "reduce")
    assert allocator.reserved_bytes == 80 * MiB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator("classic")
    for number, size in enumerate((60, 40, 50)):
        allocator.take(number, size * MiB)
    for number in range(3):
        allocator.give(number)
    allocator.take(3, 45 * MiB)  # the 50, of which 5 are left
    allocator.take(4, 40 * MiB)
    allocator.take(5, 60 * MiB)
    assert allocator.reserved_bytes == 150 * MiB
    allocator.take(6, 5 * MiB)
    assert allocator.reserved_bytes == 150 * MiB


def test_neighbours_become_one_again() -> None:
    allocator = CachingAllocator("classic")
    allocator.take(0, 60 * MiB)
    allocator.give(0)
    for number in range(1, 4):
        allocator.take(number, 20 * MiB)
    for number in (1, 3, 2):
        allocator.give(number)
    allocator.take(4, 60 * MiB)
    assert allocator.reserved_bytes == 60 * MiB


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    allocator = CachingAllocator("expandable")
    allocator.take(0, 20 * MiB)
    allocator.take(1, 20 * MiB)
    allocator.give(1)
    allocator.take(2, 30 * MiB)  # the free 20 and a page of 20 more
    assert allocator.reserved_bytes == 60 * MiB


def test_the_block_that_can_grow_is_taken_last() -> None:
    allocator = CachingAllocator("expandable")
    for number in range(4):
        allocator.take(number, 20 * MiB * (2 if number == 0 else 1))
    allocator.give(0)  # 40 MiB inside
    allocator.give(3)  # 20 MiB at the end, which would fit better
    allocator.take(4, 20 * MiB)
    allocator.take(5, 60 * MiB)  # the end has grown by two pages only
    assert allocator.reserved_bytes == 140 * MiB


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_given_back_when_the_device_is_full(
    kind: Kind, snapshot: SnapshotAssertion
) -> None:
    allocator = CachingAllocator(kind, limit_bytes=100 * MiB)
    allocator.take(0, 60 * MiB)
    allocator.give(0)
    allocator.take(1, 80 * MiB, "reduce")
    assert allocator.releases == 1
    assert allocator.reserved_bytes == 80 * MiB
    with pytest.raises(OutOfMemory) as caught:
        allocator.take(2, 40 * MiB)
    assert caught.value == snapshot


def test_a_log_is_simulated() -> None:
    log = [
        Allocation(kind="mark", mark="step 0"),
        Allocation(kind="take", number=1, size_bytes=30 * MiB),
        Allocation(kind="take", number=2, size_bytes=30 * MiB, stream="gather"),
        Allocation(kind="give", number=1, size_bytes=30 * MiB),
        Allocation(kind="take", number=3, size_bytes=30 * MiB, stream="gather"),
    ]
    found = simulate(log, "classic")
    assert (found.peak_bytes, found.live_bytes, found.releases) == (90 * MiB, 60 * MiB, 0)


SIZES = st.sampled_from([1, 700, 5000, MiB, MiB + 1, 3 * MiB, 12 * MiB, 20 * MiB, 47 * MiB])
MOVES = st.lists(
    st.tuples(st.integers(0, 5), SIZES, st.sampled_from(["compute", "gather", "reduce"])),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), moves=MOVES, releases=st.sets(st.integers(0, 79), max_size=4))
def test_what_always_holds(
    kind: Kind, moves: list[tuple[int, int, str]], releases: set[int]
) -> None:
    allocator = CachingAllocator(kind)
    there: list[int] = []
    for number, (move, size_bytes, stream) in enumerate(moves):
        if move < 2 and there:
            allocator.give(there.pop((number * 7 + move) % len(there)))
        else:
            allocator.take(number, size_bytes, stream)
            there.append(number)
        if number in releases:
            allocator.release()
        assert allocator.reserved_bytes >= allocator.live_bytes
        stretches = allocator.stretches()
        assert all(one[1] <= two[0] for one, two in pairwise(stretches))
        assert sum(end - begin for begin, end in stretches) == allocator.live_bytes
    for number in there:
        allocator.give(number)
    assert allocator.live_bytes == 0
    allocator.release()
    assert allocator.reserved_bytes == 0
