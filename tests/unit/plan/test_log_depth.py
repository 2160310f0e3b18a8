"""Logs of deep models, made from those of two shallow ones."""

import random
from collections.abc import Iterator

import pytest

from torchmuster.plan.memory.log_depth import (
    Unlike,
    events_in_order,
    extended,
    live_peak,
    merge_logs,
)
from torchmuster.plan.record import Allocation


def take(number: int, size_bytes: int, stream: str = "compute") -> Allocation:
    return Allocation(kind="take", number=number, size_bytes=size_bytes, stream=stream)  # type: ignore[arg-type]


def give(number: int) -> Allocation:
    return Allocation(kind="give", number=number)


def mark(words: str) -> Allocation:
    return Allocation(kind="mark", mark=words)


def training(blocks: int, *, shard: int = 64) -> Iterator[Allocation]:
    """Two steps that gather ahead, keep activations, reduce behind, and loop over all parameters."""
    for block in range(blocks):
        yield take(block, shard)
    yield take(900, 7 * blocks)  # one tensor about all blocks
    for step in range(2):
        base = 10_000 * (step + 1)
        yield mark(f"step {step}")
        for block in range(blocks):
            yield mark(f"forward 0 {block}")
            yield take(base + block, 512, "gather")
            yield take(base + 100 + block, 96)
            yield take(base + 200 + block, 33)
            yield give(base + 200 + block)
            if block:
                yield give(base + block - 1)
        yield mark("loss 0")
        yield take(base + 300, 2000)
        yield give(base + blocks - 1)
        yield mark("backward 0")
        for block in reversed(range(blocks)):
            yield mark(f"backward 0 {block}")
            if block:
                yield take(base + 400 + block, 512, "gather")  # the next one, ahead
            yield take(base + 500 + block, 512, "reduce")
            yield give(base + 100 + block)
            yield take(base + 600 + block, shard)
            if block < blocks - 1:
                yield give(base + 500 + block + 1)
                yield give(base + 400 + block + 1)
        yield give(base + 500)
        yield give(base + 300)
        yield mark("update 0")
        for block in range(blocks):
            yield take(base + 700 + block, 2 * shard)
        for block in range(blocks):
            yield give(base + 700 + block)
            yield give(base + 600 + block)


def pairs(log: list[Allocation]) -> list[tuple[object, ...]]:
    """Each event, and where what is given back was taken."""
    taken: dict[int, int] = {}
    found: list[tuple[object, ...]] = []
    for number, event in enumerate(log):
        if event.kind == "take":
            taken[event.number] = number
            found.append(("take", event.size_bytes, event.stream))
        elif event.kind == "give":
            found.append(("give", taken[event.number]))
        else:
            found.append(("mark", event.mark.split()[0]))
    return found


def made(
    blocks: int, *, shards: tuple[int, ...] = (64,), at: tuple[float, ...] = (1.0,)
) -> list[Allocation]:
    shallow, deep = (
        merge_logs([events_in_order(list(training(depth, shard=one))) for one in shards])
        for depth in (3, 4)
    )
    return list(extended(shallow, deep, times=blocks - 3, at=at))


@pytest.mark.parametrize("blocks", [3, 4, 5, 9, 40])
def test_the_log_of_any_depth_is_the_one_that_the_model_has(blocks: int) -> None:
    truth = events_in_order(list(training(blocks)))
    log = events_in_order(made(blocks))
    assert pairs(log) == pairs(truth)
    assert live_peak(log) == live_peak(truth)
    assert live_peak(log, from_mark="step 1") == live_peak(truth, from_mark="step 1")


def test_sizes_between_two_numbers_of_shards() -> None:
    truth = events_in_order(list(training(20, shard=48)))
    log = events_in_order(made(20, shards=(64, 32), at=(0.5, 0.5)))
    assert pairs(log) == pairs(truth)


def test_the_order_in_which_things_are_given_back_at_once_does_not_matter() -> None:
    log = [
        take(1, 10),
        take(2, 20),
        take(3, 30),
        mark("step 0"),
        give(1),
        give(3),
        give(2),
        take(4, 1),
    ]
    shuffled = [*log[:4], *random.Random(3).sample(log[4:7], 3), log[7]]
    assert events_in_order(log) == events_in_order(shuffled)
    assert [event.number for event in events_in_order(log)[4:7]] == [3, 2, 1]


def test_logs_of_two_trainings_are_not_taken_for_one() -> None:
    short, long = list(training(3)), list(training(4))
    with pytest.raises(Unlike, match="the logs have"):
        merge_logs([short, long])
    changed = [*short[:5], take(5555, 1), *short[6:]]
    with pytest.raises(Unlike, match="event 5 "):
        merge_logs([short, changed])
    other = [take(number, 1000 + number) for number in range(400)]
    with pytest.raises(Unlike, match="does not occur"):
        list(extended(merge_logs([short]), merge_logs([other]), times=3, at=(1.0,)))
