"""Ranks that are asked to end by signals."""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patience import GIVE_UP_S
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE
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


def in_special_situations(world: World) -> dict[str, End]:
    """All ranks at once; a slow rank; before the first step; after the last one."""
    _meet_at_a_tcp_store(world)
    is_last = world.global_rank == world.world_size - 1

    def uneven() -> None:
        time.sleep(0.02 if is_last else 0.005)

    ends = {}
    dist.barrier()
    ends["all at once"] = _train(world, dist.barrier, [(0.1, "SIGTERM"), (0.1, "SIGUSR1")])
    dist.barrier()
    sends = [(0.2, "SIGUSR1")] if world.is_first else []
    ends["a slow rank"] = _train(world, uneven, sends, not_before=1)
    dist.barrier()
    ends["before the first"] = _train(
        world, dist.barrier, [(None, "SIGTERM")] if is_last else [], heard_first=True
    )
    ends["the last"] = _in_the_last_step(world, is_last)
    return ends


def _in_the_last_step(world: World, is_asked: bool) -> End:
    """One gets a signal in the last step, which takes all ranks until they have heard of it."""
    sent_at = None
    with StopRequest(world) as stop:
        for done in (1, 2, 3):
            if done == 3:
                if is_asked:
                    sent_at = stop._done
                    os.kill(os.getpid(), signal.SIGTERM)
                _await(lambda: stop.words)
            if stop.due(done):
                break
        return End(step=done, words=stop.words, sent_at=sent_at)


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
        _await(lambda: stop.words)
        seen.append(stop.words)
        group.set(f"rank {world.global_rank} heard", "")

    end = _train(world, step, [(0.2, "SIGUSR1")] if world.is_first else [], look=look)
    return seen[0], end


def when_others_are_gone(world: World) -> list[int]:
    """Rank 1 fails; rank 0 gets SIGUSR1 and then SIGTERM: return what it would end with."""
    _meet_at_a_tcp_store(world)
    with (
        _noting_exits() as codes,
        contextlib.suppress(RuntimeError),
        StopRequest(world) as stop,
    ):
        dist.barrier()
        if world.global_rank == 1:
            raise RuntimeError("out of memory")
        _await(lambda: not stop._threads[0].is_alive())  # it has heard of the failure
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        assert not stop.due(1)
        assert not codes  # a warning alone ends nobody
        os.kill(os.getpid(), signal.SIGTERM)
        _await(lambda: codes)
    return codes


def when_one_cannot_answer_at_once(world: World) -> list[object]:
    """Rank 1 keeps Python from running: too long for the first request, not for the one after it."""
    _meet_at_a_tcp_store(world)
    away, back = _pipes(world)
    found: list[bool] = []
    _MODULE._WISHES_ARE_ANSWERED_WITHIN_S = 0.2
    with _noting_exits() as codes, StopRequest(world) as stop:
        for step in (1, 2):
            dist.barrier()
            if world.global_rank == 1:
                _keep_python_from_running(away, back)
            elif world.is_first:
                os.read(away, 1)
                _await(lambda: stop._round == len(found))  # and hears a signal anew
                os.kill(os.getpid(), signal.SIGUSR1)
                # It is being followed, or was dropped already.
                _await(lambda: stop._agreement is not None or stop._round > len(found))
                if step == 1:
                    assert not stop.due(step)  # the request was dropped without rank 1
                os.write(back, b"x")
            found.append(stop.due(step))
            dist.barrier()
            _MODULE._WISHES_ARE_ANSWERED_WITHIN_S = GIVE_UP_S
        # It may have answered with the step that it was in.
        return [found[0], found[1] or stop.due(3), stop.words, codes]


def _pipes(world: World) -> tuple[int, int]:
    """Return two pipes that all ranks have."""
    folder = tempfile.mkdtemp() if world.is_first else None
    if folder is not None:
        os.mkfifo(Path(folder, "away"))
        os.mkfifo(Path(folder, "back"))
    place = all_gather_object(folder, world)[0]
    away, back = (os.open(Path(place, name), os.O_RDWR) for name in ("away", "back"))
    dist.barrier()
    if folder is not None:
        shutil.rmtree(folder)
    return away, back


def _keep_python_from_running(away: int, back: int) -> None:
    """Let no thread of this process run Python until another process says so, as a C extension may."""
    library, said = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # nor between the two calls
    library.write(away, b"x", 1)
    library.read(back, said, 1)
    sys.setswitchinterval(usual_s)


def when_one_is_killed(world: World) -> bool:
    """Rank 1 answers no more, and its process is gone: nobody waits for it, not even at a warning."""
    _meet_at_a_tcp_store(world)
    if world.global_rank == 1:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        _MODULE.process_address = lambda: f"{stop_request._host_id()} {gone.pid}"
        StopRequest._follow = lambda *_: None  # type: ignore[method-assign]
    with StopRequest(world) as stop:
        dist.barrier()
        if world.is_first:
            os.kill(os.getpid(), signal.SIGUSR1)
            _await(lambda: stop._round == 1)
        dist.barrier()
        return stop.due(1)


@contextlib.contextmanager
def _noting_exits() -> Iterator[list[int]]:
    """Note with which codes this process would have ended."""
    codes: list[int] = []
    exit_itself = os._exit
    os._exit = codes.append  # type: ignore[assignment]
    try:
        yield codes
    finally:
        os._exit = exit_itself


def _await(true: Callable[[], object]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def when_the_store_is_gone(world: World) -> tuple[list[int], bool]:
    """The process that has the store ends; rank 0 is asked to end afterwards."""
    store = _meet_at_a_tcp_store(world)
    codes: list[int] = []
    due = False
    if world.global_rank == 1:
        with _noting_exits() as codes, StopRequest(world) as stop:
            dist.barrier()
            dist.barrier()  # the store is gone
            os.kill(os.getpid(), signal.SIGTERM)
            _await(lambda: codes)
            due = stop.due(1)
    else:
        dist.barrier()
        _MODULE.group_store = lambda: None
        del store
        dist.barrier()
    dist.barrier()
    return codes, due


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
            _await(lambda: stop.words)
        done = 0
        for done in range(1, _MANY + 1):
            step()
            if stop.due(done):
                break
        for timer in timers:
            timer.join()
        return End(step=done, words=stop.words, sent_at=min(sent, default=None))


def _meet_at_a_tcp_store(world: World) -> Any:
    """Put a store as launched ranks have it in the place of the tests' file."""
    os.environ[GRACE_VARIABLE] = str(2 * GIVE_UP_S)  # for answers, on a busy machine as well
    timeout = timedelta(seconds=GIVE_UP_S)
    store = None
    if world.is_first:
        store = _DIST.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    port = all_gather_object(store.port if store else None, world)[0]
    if store is None:
        store = _DIST.TCPStore("127.0.0.1", port, timeout=timeout)
    _MODULE.group_store = lambda: store
    return store
