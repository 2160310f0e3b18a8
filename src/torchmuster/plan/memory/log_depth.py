"""Build the allocation log of a deep model from the logs of two shallow ones.

The deeper of the two has one more block, so its log equals the other log with inserted sections: a
block's forward, its backward, its part of each loop over all parameters. A log of any depth repeats
these sections. A freed tensor is identified by its rank: the n-th newest of the tensors of its
size, which in both logs is the same or changes by a fixed number with each block.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from torchmuster.plan.memory.shard_degree import shard_elements, shard_sizes
from torchmuster.plan.record import Allocation, TraceRecord

_WINDOWS = (64, 32, 16, 8, 4, 1)  # number of events that must agree after an inserted section

Size: TypeAlias = tuple[int, ...]  # of one tensor in logs that differ in sizes only


class Unlike(Exception):
    """The logs cannot be extended: they belong to different runs, or the blocks do not repeat."""


@dataclass(slots=True)
class Event:
    """One event of logs that differ in sizes only."""

    kind: str
    size: Size
    stream: str
    category: str
    mark: str
    newest: int = 0  # give: its rank among live tensors of its size, 0 for the newest
    taken_at: int = 0  # give: where in the log it was allocated
    token: int = 0


def read_log(path: str | Path) -> list[Allocation]:
    """Read a log."""
    decoder = msgspec.json.Decoder(Allocation)
    return decoder.decode_lines(Path(path).read_bytes())


def events_in_order(log: Sequence[Allocation]) -> list[Allocation]:
    """Return a log in which consecutive frees are ordered newest first.

    The order makes no difference for an allocator, and it is arbitrary: autocast frees its copies
    in the order of a hash table.
    """
    taken_at: dict[int, int] = {}
    found: list[Allocation] = []
    at_once: list[Allocation] = []
    for number, event in enumerate(log):
        if event.kind == "give":
            at_once.append(event)
            continue
        found += sorted(at_once, key=lambda one: -taken_at[one.number])
        at_once = []
        found.append(event)
        taken_at[event.number] = number
    return found + sorted(at_once, key=lambda one: -taken_at[one.number])


def merge_logs(logs: Sequence[Sequence[Allocation]]) -> list[Event]:
    """Merge logs of one depth, with the same events in the same order, into one with all sizes."""
    if len({len(log) for log in logs}) != 1:
        raise Unlike(f"the logs have {', '.join(str(len(log)) for log in logs)} events")
    events = []
    taken: dict[int, tuple[int, Event]] = {}
    there: dict[Hashable, list[int]] = {}  # live tensors of each size, the newest last
    for number, same in enumerate(zip(*logs, strict=True)):
        first = same[0]
        if any(one.kind != first.kind or one.number != first.number for one in same[1:]):
            raise Unlike(f"event {number} is not the same in all logs")
        if first.kind == "give":
            at, take = taken.pop(first.number)
            alike = there[_look_log_depth(take)]
            event = Event("give", take.size, take.stream, take.category, "")
            event.newest, event.taken_at = len(alike) - 1 - alike.index(at), at
            alike.remove(at)
        else:
            sizes = tuple(one.size_bytes for one in same)
            event = Event(
                first.kind, sizes, first.stream, first.category, _log_depth_plain(first.mark)
            )
            if first.kind == "take":
                taken[first.number] = (number, event)
                there.setdefault(_look_log_depth(event), []).append(number)
        events.append(event)
    return events


def _look_log_depth(event: Event) -> Hashable:
    return (event.size, event.stream, event.category)


def _log_depth_plain(mark: str) -> str:
    """Return a mark without its block number."""
    words = mark.split()
    return " ".join([*words[:2], "block"] if len(words) > 2 else words)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a deep log: events that occur once, or once more with each further block.

    ``shallow`` and ``deep`` are the same events in the two logs. For a repeated section they are
    the events before the insertion, and ``added`` is the inserted section.
    """

    shallow: tuple[int, ...]
    deep: tuple[int, ...]
    added: tuple[int, ...] = ()


def aligned(shallow: Sequence[Event], deep: Sequence[Event]) -> list[Piece]:
    """Return the deeper log as the other one with inserted sections."""
    one, two = _tokens(shallow, deep)
    pieces: list[Piece] = []
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(one) or j < len(two):
        if i < len(one) and j < len(two) and one[i] == two[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        length = _put_in(one, two, i, j)
        earlier = _earlier(shallow, deep, pairs, j, length)
        del pairs[len(pairs) - earlier :]
        i, j = i - earlier, j - earlier
        pieces.append(_once(pairs))
        pieces.append(_repeated(pairs, j, length))
        pairs = []
        j += length
    return [*pieces, _once(pairs)]


def _tokens(shallow: Sequence[Event], deep: Sequence[Event]) -> tuple[list[int], list[int]]:
    """Return a number for each event; equal events have equal numbers.

    A size that only one of the logs has belongs to a tensor over all blocks, which grows with the
    depth: all such sizes count as equal.
    """
    common = {_look_log_depth(event) for event in shallow} & {
        _look_log_depth(event) for event in deep
    }
    known: dict[Hashable, int] = {}
    for event in (*shallow, *deep):
        size = event.size if _look_log_depth(event) in common else None
        look = (event.kind, size, event.stream, event.category, event.mark)
        event.token = known.setdefault(look, len(known))
    return [event.token for event in shallow], [event.token for event in deep]


def _earlier(
    shallow: Sequence[Event],
    deep: Sequence[Event],
    pairs: Sequence[tuple[int, int]],
    j: int,
    length: int,
) -> int:
    """Return how many events before the first difference a section was inserted.

    The events after it may start as it does, so its position is ambiguous; matching ranks decide.
    """
    best = back = 0
    unlike = fewest = 0  # ranks that agree less often than without an offset
    while back < min(len(pairs), length):
        i, before = pairs[-1 - back]
        after = before + length
        if before != j - 1 - back or deep[before].token != deep[after].token:
            break
        back += 1
        rank = shallow[i].newest
        unlike += (rank != deep[after].newest) - (rank != deep[before].newest)
        if unlike < fewest:
            best, fewest = back, unlike
    return best


def _once(pairs: Sequence[tuple[int, int]]) -> Piece:
    return Piece(shallow=tuple(i for i, _ in pairs), deep=tuple(j for _, j in pairs))


def _repeated(before: Sequence[tuple[int, int]], j: int, length: int) -> Piece:
    """Return the inserted section, with the same events one block earlier if contiguous."""
    last = before[-length:]
    if len(last) < length:
        last = []
    return Piece(
        shallow=tuple(i for i, _ in last),
        deep=tuple(at for _, at in last),
        added=tuple(range(j, j + length)),
    )


def _put_in(one: list[int], two: list[int], i: int, j: int) -> int:
    """Return how many events were inserted before event ``i`` of the shallower log.

    After them the logs agree again. They repeat the events before them, if any candidate does: the
    first and the last block differ from those between, and must not be taken for the insertion.
    """
    if i == len(one):
        return len(two) - j
    most = len(two) - j - (len(one) - i)
    for repeats in (True, False):
        for window in _WINDOWS:
            ahead = list(one[i : i + window])
            for length in range(1, most + 1):
                begin = j + length
                if two[begin] != ahead[0] or (repeats and two[j:begin] != two[j - length : j]):
                    continue
                if two[begin : begin + len(ahead)] == ahead:
                    return length
    raise Unlike(f"event {i} of the shallower log does not occur in the deeper one")


def extended(
    shallow: Sequence[Event],
    deep: Sequence[Event],
    *,
    times: int,
    at: Sequence[float],
    known: Mapping[Size, int] | None = None,
) -> Iterator[Allocation]:
    """Yield the log of a model with ``times`` more blocks than the shallower one.

    ``at`` weights the sizes of an event: a tensor has the size ``sum(weight x size)``. ``known``
    has the sizes of shards and gathered tensors that include padding rows.
    """
    writer = _Writer(shallow, deep, times=times, at=at, known=known or {})
    for piece in aligned(shallow, deep):
        if not piece.added:
            for i, j in zip(piece.shallow, piece.deep, strict=True):
                yield from writer.once(i, j)
        for repetition in range(1, times + 1) if piece.added else ():
            for position in range(len(piece.added)):
                yield from writer.again(piece, position, repetition)


class _Writer:
    """Write events of the deep log, and track live tensors."""

    def __init__(
        self,
        shallow: Sequence[Event],
        deep: Sequence[Event],
        *,
        times: int,
        at: Sequence[float],
        known: Mapping[Size, int],
    ) -> None:
        self._shallow = shallow
        self._deep = deep
        self._times = times
        self._at = at
        self._known = known
        self._number = 0
        self._there: dict[Hashable, list[tuple[int, int]]] = {}  # numbers and sizes, by look
        self._resized: dict[int, Hashable] = {}  # by its allocation in the shallower log

    def once(self, i: int, j: int) -> Iterator[Allocation]:
        one, two = self._shallow[i], self._deep[j]
        if one.kind == "give":
            rank = one.newest + (two.newest - one.newest) * self._times
            look = self._resized.get(one.taken_at, _look_log_depth(one))
            yield self._give(look, rank)
            return
        size = tuple(a + (b - a) * self._times for a, b in zip(one.size, two.size, strict=True))
        look = _look_log_depth(one)
        if one.kind == "take" and one.size != two.size:
            look = self._resized[i] = ("resized", i)
        yield self._take_or_mark(one, look, size)

    def again(self, piece: Piece, position: int, repetition: int) -> Iterator[Allocation]:
        event = self._deep[piece.added[position]]
        if event.kind != "give":
            yield self._take_or_mark(event, _look_log_depth(event), event.size)
            return
        rank = event.newest
        if piece.shallow:
            before = self._deep[piece.deep[position]].newest
            shallower = self._shallow[piece.shallow[position]].newest
            rank = shallower + (before - shallower) * self._times + (rank - before) * repetition
        yield self._give(_look_log_depth(event), rank)

    def _take_or_mark(self, event: Event, look: Hashable, size: Size) -> Allocation:
        if event.kind == "mark":
            return Allocation(kind="mark", mark=event.mark)
        self._number += 1
        whole = self._whole(event, size)
        self._there.setdefault(look, []).append((self._number, whole))
        return Allocation(
            kind="take",
            number=self._number,
            size_bytes=whole,
            stream=event.stream,  # type: ignore[arg-type]
            category=event.category,
        )

    def _whole(self, event: Event, size: Size) -> int:
        # An activation can have the size of a parameter, but does not change with the shards.
        if event.category == "collectives" or len(set(size)) > 1:
            known = self._known.get(size)
            if known is not None:
                return known
        return max(round(sum(w * s for w, s in zip(self._at, size, strict=True))), 0)

    def _give(self, look: Hashable, rank: int) -> Allocation:
        there = self._there.get(look, [])
        if not 0 <= rank < len(there):
            raise Unlike(
                f"the freed tensor is number {rank + 1} from the newest, of {len(there)} live ones"
            )
        number, size = there.pop(len(there) - 1 - rank)
        return Allocation(kind="give", number=number, size_bytes=size)


def log_of_depth(records: Sequence[TraceRecord], *, blocks: int, shards: int) -> list[Allocation]:
    """Return the log of a model with ``blocks`` blocks, from logs with its micro-batch size."""
    depths = sorted({record.blocks_traced for record in records})
    if blocks in depths[:2]:
        shallow = deep = _of_one_depth(records, blocks)
        times = 0
    elif len(depths) > 1:
        shallow, deep = (_of_one_depth(records, depth) for depth in depths[:2])
        times = (blocks - depths[0]) // (depths[1] - depths[0])
    else:
        raise Unlike("logs of two depths are needed, but there is at most one")
    degrees = sorted({record.request.candidate.layout.shards for record in records})
    shapes = records[0].parameters
    elements = [shard_elements(shapes, one, blocks=blocks) for one in (*degrees, shards)]
    known = shard_sizes(shapes, degrees, shards=shards) if len(degrees) > 1 else None
    return list(extended(shallow, deep, times=times, at=_log_depth_weights(elements), known=known))


def _of_one_depth(records: Sequence[TraceRecord], depth: int) -> list[Event]:
    """Return the logs of one depth merged into one, those with fewer shards first."""
    logs = {
        record.request.candidate.layout.shards: str(record.log)
        for record in records
        if record.blocks_traced == depth
    }
    return merge_logs([events_in_order(read_log(logs[shards])) for shards in sorted(logs)])


def _log_depth_weights(elements: Sequence[int]) -> tuple[float, ...]:
    """Return weights for the sizes of each log that sum to the size with the wanted shards.

    ``elements`` counts the elements of a rank's shards: for each traced number, then the wanted.
    """
    if len(elements) < 3 or elements[0] == elements[1]:
        return (1.0, *(0.0 for _ in elements[2:]))
    part = (elements[2] - elements[0]) / (elements[1] - elements[0])
    return (1.0 - part, part)


def live_peak(events: Sequence[Allocation], *, from_mark: str = "") -> int:
    """Return the peak of live bytes in a log, from a mark on."""
    sizes: dict[int, int] = {}
    live = most = 0
    counts = not from_mark
    for event in events:
        if event.kind == "take":
            sizes[event.number] = event.size_bytes
            live += event.size_bytes
        elif event.kind == "give":
            live -= sizes.pop(event.number, 0)
        elif event.mark == from_mark:
            counts, most = True, live
        if counts and live > most:
            most = live
    return most
