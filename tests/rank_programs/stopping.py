"""Ranks that are asked to end by signals."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from patience import GIVE_UP_S
from torchmuster.train import stop_request
from torchmuster.train.stop_request import StopRequest
from torchmuster.train.world import World, all_gather_object

_MANY = 100_000
# What torch and a module keep to themselves.
_DIST: Any = dist
_MODULE: Any = stop_request


@dataclass
class End:
    """Where a rank ended; where it was when it sent itself a signal, None if it did not."""

    step: int
    words: str
    sent_at: int | None


def at_random_moments(world: World, rounds: int) -> list[End]:
    """Steps of random lengths in lockstep; a signal to a random rank at a random moment."""
    _meet_at_a_tcp_store(world)
    alike = random.Random(1)  # the same on all ranks
    own = random.Random(world.global_rank)
    ends = []
    for _ in range(rounds):
        rank, after_s = alike.randrange(world.world_size), alike.uniform(0, 0.12)
        name = alike.choice(["SIGTERM", "SIGUSR1"])

        def step() -> None:
            time.sleep(own.uniform(0, 0.02))
            dist.barrier()

        sends = [(after_s, name)] if world.global_rank == rank else []
        ends.append(_train(world, step, sends))
    return ends


def while_blocked(world: World) -> tuple[str, End]:
    """Every rank waits in a collective for one that comes when all have heard of a signal."""
    _meet_at_a_tcp_store(world)
    group = _DIST.distributed_c10d._get_default_store()
    seen: list[str] = []

    def step() -> None:
        if world.global_rank == 1:
            group.wait([f"rank {rank} heard" for rank in range(world.world_size)])
        dist.barrier()

    def look(stop: StopRequest) -> None:
        _await(lambda: stop.origin)
        seen.append(stop.origin)
        group.set(f"rank {world.global_rank} heard", "")

    end = _train(world, step, [(0.2, "SIGUSR1")] if world.is_first else [], look=look)
    return seen[0], end


def _await(true: Callable[[], object]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def _train(
    world: World,
    step: Callable[[], object],
    sends: Sequence[tuple[float | None, str]],
    *,
    heard_first: bool = False,
    not_before: int = 0,
    look: Callable[[StopRequest], None] | None = None,
) -> End:
    """Train until asked to end; each signal is sent after so many seconds (None: at once) and steps."""
    sent: list[int] = []
    with StopRequest(world) as stop:

        def send(name: str) -> None:
            _await(lambda: stop._done >= not_before)
            sent.append(stop._done)
            os.kill(os.getpid(), signal.Signals[name])

        timers: list[threading.Thread] = [
            threading.Timer(after_s, send, [name]) for after_s, name in sends if after_s
        ]
        timers += [threading.Thread(target=look, args=[stop])] if look else []
        for timer in timers:
            timer.start()
        for after_s, name in sends:
            if after_s is None:
                send(name)
        if heard_first:
            _await(lambda: stop.origin)
        done = 0
        for done in range(1, _MANY + 1):
            step()
            if stop.due(done):
                break
        for timer in timers:
            timer.join()
        return End(step=done, words=stop.origin, sent_at=min(sent, default=None))


def _meet_at_a_tcp_store(world: World) -> Any:
    """Put a store as launched ranks have it in the place of the tests' file."""
    timeout = timedelta(seconds=GIVE_UP_S)
    store = None
    if world.is_first:
        store = _DIST.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    port = all_gather_object(store.port if store else None, world)[0]
    if store is None:
        store = _DIST.TCPStore("127.0.0.1", port, timeout=timeout)
    _MODULE.group_store = lambda: store
    return store
