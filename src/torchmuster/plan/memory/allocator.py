"""Simulate PyTorch's CUDA caching allocator over a log, to get the memory that it reserves.

The rules follow ``c10/cuda/CUDACachingAllocator.cpp``; its functions are named in brackets:

- sizes are rounded up to 512 bytes (``round_size``); up to 1 MiB is small, the rest is large, in
  separate pools for each stream (``get_pool``, ``BlockComparatorSize``);
- the smallest sufficient free block with the lowest address is taken (``get_free_block``), and its
  remainder stays free (``should_split``: from 512 bytes on; in large classic segments only above
  1 MiB);
- if there is none, *classic* requests 2 MiB (small), 20 MiB (below 10 MiB), or the size in steps
  of 2 MiB from the device (``get_allocation_size``); *expandable* extends the pool's one segment by
  pages of 2 MiB (small) or 20 MiB (``try_allocate_expandable_block``), and takes a block that can
  grow only if no other fits;
- free neighbours are merged (``try_merge_blocks``); memory is returned to the device only when the
  device is full, in whole free segments or pages (``release_cached_blocks``).

FSDP frees memory that several streams use after it has waited for them, so no block waits for
events.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.errors import OutOfMemory
from torchmuster.plan.record import Allocation
from torchmuster.units import MiB, format_bytes

Kind: TypeAlias = Literal["expandable", "classic"]
# The variable that ``muster train`` sets: expandable segments reduce fragmentation, and the plan assumes them.
ALLOCATOR_SETTING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")

_ROUNDING = 512
_SMALL = MiB
_SMALL_SEGMENT = 2 * MiB
_LARGE_SEGMENT = 20 * MiB
_LARGE_ALONE = 10 * MiB  # from here on a request gets its own segment
_STEP = 2 * MiB
_FAR = 1 << 50  # between segments' addresses, so that they never touch


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The peak memory that the allocator reserved, and the peak that tensors used."""

    peak_bytes: int
    live_bytes: int  # rounded up as the allocator does
    releases: int = 0  # times that it had to return cached memory to the device


class _Block:
    """A range of addresses: in use, free, or (expandable) not mapped to memory."""

    __slots__ = ("address", "mapped", "next", "prev", "size", "used")

    def __init__(self, address: int, size: int, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.used = False
        self.mapped = mapped
        self.prev: _Block | None = None
        self.next: _Block | None = None


class _Pool:
    """Small or large blocks of one stream."""

    def __init__(self, number: int, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.free: list[tuple[int, int]] = []  # size, address
        self.blocks: dict[int, _Block] = {}  # those in ``free``, by address
        self.reserved = 0
        self._next_address = number * (_FAR << 10)
        self._page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        self._holes: list[tuple[int, _Block]] = []  # addresses without memory
        if expandable:
            beyond = _Block(self._next_address, _FAR, mapped=False)
            self._holes.append((beyond.address, beyond))

    def take(self, size: int) -> _Block | None:
        """Return the best free block, cut to size; None if there is none."""
        found = self._best(size)
        return None if found is None else self.cut(self._out_of_free(found), size)

    def _best(self, size: int) -> _Block | None:
        at = bisect_left(self.free, (size, 0))
        if at == len(self.free):
            return None
        best = self.blocks[self.free[at][1]]
        if _can_grow(best) and at + 1 < len(self.free):
            other = self.blocks[self.free[at + 1][1]]
            # Prefer blocks that cannot grow; keep growable ones for requests that need them.
            return best if _can_grow(other) and other.size > best.size else other
        return best

    def extend(self, size: int) -> tuple[_Block, int]:
        """Return a sufficient free block of new memory, and how much the device provided."""
        before = self.reserved
        if not self.expandable:
            given = _segment_size(size)
            block = _Block(self._next_address, given)
            self._next_address += given + _FAR
            self.reserved += given
            return block, given
        block = self._room_for(size)
        while not block.mapped or block.size < size:
            if block.mapped:
                hole = block.next
                assert hole is not None  # its size was counted before
                self._out_of_free(block)
                block = self._map(hole, size - block.size, onto=block)
            else:
                block = self._map(block, size, onto=None)
            self._into_free(block)
        self._out_of_free(block)
        return block, self.reserved - before

    def _room_for(self, size: int) -> _Block:
        """Return the lowest free or unmapped block that, with what follows it, is large enough."""
        for _, hole in self._holes:
            first = hole
            if hole.prev is not None and not hole.prev.used:
                first = hole.prev
            room, one = 0, first
            while room < size and one is not None and not one.used:
                room += one.size
                one = one.next  # type: ignore[assignment]
            if room >= size:
                return first
        raise AssertionError("the last hole is larger than any device")

    def _map(self, hole: _Block, size: int, *, onto: _Block | None) -> _Block:
        """Map memory to the start of a hole, and merge it with the adjacent free blocks."""
        given = min(-(-size // self._page) * self._page, hole.size)
        self._holes.remove((hole.address, hole))
        if given < hole.size:
            rest = _Block(hole.address + given, hole.size - given, mapped=False)
            _splice(rest, hole, hole.next)
            insort(self._holes, (rest.address, rest), key=lambda one: one[0])
            hole.size = given
        hole.mapped = True
        self.reserved += given
        if onto is not None:
            _absorb(onto, hole)
            hole = onto
        following = hole.next
        if following is not None and following.mapped and not following.used:
            self._out_of_free(following)
            _absorb(hole, following)
        return hole

    def cut(self, block: _Block, size: int) -> _Block:
        """Mark a block as used; its remainder becomes a free block after it."""
        left = block.size - size
        if left >= _ROUNDING if self.small or self.expandable else left > _SMALL:
            rest = _Block(block.address + size, left)
            _splice(rest, block, block.next)
            block.size = size
            self._into_free(rest)
        block.used = True
        return block

    def give(self, block: _Block) -> None:
        """Free a block, and merge it with free neighbours."""
        block.used = False
        before, after = block.prev, block.next
        if before is not None and before.mapped and not before.used:
            self._out_of_free(before)
            _absorb(before, block)
            block = before
        if after is not None and after.mapped and not after.used:
            self._out_of_free(after)
            _absorb(block, after)
        self._into_free(block)

    def release(self) -> int:
        """Return whole free segments or pages to the device; return the number of bytes."""
        before = self.reserved
        for block in list(self.blocks.values()):
            if not self.expandable:
                if block.prev is None and block.next is None:
                    self._out_of_free(block)
                    self.reserved -= block.size
            else:
                self._unmap(block)
        return before - self.reserved

    def _unmap(self, block: _Block) -> None:
        """Unmap the whole pages of a free block."""
        base = block.address & ~(_FAR - 1)
        begin = base + -(-(block.address - base) // self._page) * self._page
        end = base + (block.address + block.size - base) // self._page * self._page
        if begin >= end:
            return
        self._out_of_free(block)
        if begin > block.address:
            first = _Block(block.address, begin - block.address)
            _splice(first, block.prev, block)
            self._into_free(first)
        if end < block.address + block.size:
            last = _Block(end, block.address + block.size - end)
            _splice(last, block, block.next)
            self._into_free(last)
        block.address, block.size, block.mapped = begin, end - begin, False
        self.reserved -= block.size
        after, before = block.next, block.prev
        if after is not None and not after.mapped:
            self._holes.remove((after.address, after))
            _absorb(block, after)
        if before is not None and not before.mapped:
            self._holes.remove((before.address, before))
            _absorb(before, block)
            block = before
        insort(self._holes, (block.address, block), key=lambda one: one[0])

    def _into_free(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def _out_of_free(self, block: _Block) -> _Block:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]
        return block


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _LARGE_ALONE:
        return _LARGE_SEGMENT
    return -(-size // _STEP) * _STEP


def _can_grow(block: _Block) -> bool:
    return block.next is not None and not block.next.mapped


def _splice(block: _Block, before: _Block | None, after: _Block | None) -> None:
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def _absorb(block: _Block, following: _Block) -> None:
    block.size += following.size
    block.next = following.next
    if following.next is not None:
        following.next.prev = block


class CachingAllocator:
    """Allocate and free memory as PyTorch does on a device; a number names each allocation."""

    def __init__(self, kind: Kind = "expandable", *, limit_bytes: int | None = None) -> None:
        self._expandable = kind == "expandable"
        self._limit_bytes = limit_bytes
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._taken: dict[int, tuple[_Pool, _Block]] = {}
        self.reserved_bytes = 0
        self.live_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_live_bytes = 0
        self.releases = 0

    def take(self, number: int, size_bytes: int, stream: str = "compute") -> None:
        """Allocate memory for a tensor; size 0 allocates nothing."""
        if size_bytes <= 0:
            return
        size = -(-size_bytes // _ROUNDING) * _ROUNDING
        pool = self._pool(stream, small=size <= _SMALL)
        block = pool.take(size)
        if block is None:
            self._make_room(size if self._expandable else _segment_size(size))
            extended, given = pool.extend(size)
            self.reserved_bytes += given
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            block = pool.cut(extended, size)
        self._taken[number] = (pool, block)
        self.live_bytes += block.size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def give(self, number: int) -> None:
        """Free the allocation with this number."""
        pool_and_block = self._taken.pop(number, None)
        if pool_and_block is not None:
            pool, block = pool_and_block
            self.live_bytes -= block.size
            pool.give(block)

    def release(self) -> None:
        """Return whole free segments or pages to the device, like ``empty_cache``."""
        for pool in self._pools.values():
            self.reserved_bytes -= pool.release()

    def stretches(self) -> list[tuple[int, int]]:
        """Return start and end of the ranges in use, in order."""
        used = [block for _, block in self._taken.values()]
        return sorted((block.address, block.address + block.size) for block in used)

    def _pool(self, stream: str, *, small: bool) -> _Pool:
        key = (stream, small)
        if key not in self._pools:
            self._pools[key] = _Pool(len(self._pools) + 1, small=small, expandable=self._expandable)
        return self._pools[key]

    def _make_room(self, size: int) -> None:
        limit = self._limit_bytes
        if limit is None or self.reserved_bytes + size <= limit:
            return
        self.releases += 1
        self.release()
        if self.reserved_bytes + size > limit:
            raise OutOfMemory(
                f"{format_bytes(size)} cannot be allocated on a device of {format_bytes(limit)}",
                why=f"{format_bytes(self.live_bytes)} are in use; the allocator holds "
                f"{format_bytes(self.reserved_bytes)} including these, and cannot return more to the device",
            )


def simulate(
    events: Iterable[Allocation], kind: Kind = "expandable", *, limit_bytes: int | None = None
) -> Reserved:
    """Return what the allocator reserves for a log of allocations."""
    allocator = CachingAllocator(kind, limit_bytes=limit_bytes)
    for event in events:
        if event.kind == "take":
            allocator.take(event.number, event.size_bytes, event.stream)
        elif event.kind == "give":
            allocator.give(event.number)
    return Reserved(
        peak_bytes=allocator.peak_reserved_bytes,
        live_bytes=allocator.peak_live_bytes,
        releases=allocator.releases,
    )
