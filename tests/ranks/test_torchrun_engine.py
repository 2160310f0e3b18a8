"""Ranks under torchrun's agent: which rank failed is known whatever the other ranks do, and the grace is kept to."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent_attempt import Attempt
from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node import engines, process_cleanup
from torchmuster.launch.node.attempt import RunningAttempt
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE

pytestmark = pytest.mark.ranks

# Rank 0 ignores requests to end and says that it got one; rank 1 then dies without a word of its own.
ONE_DIES = """\
import os, pathlib, signal, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    pathlib.Path("ready").touch()
    while True: time.sleep(600)
while not pathlib.Path("ready").exists(): time.sleep(0.01)
os.kill(os.getpid(), signal.{signal})
"""
ENDS_EARLY = """\
import os, pathlib, time
if os.environ["RANK"] == "1":
    os._exit(0)
while not pathlib.Path("go").exists(): time.sleep(0.01)
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[[str], Attempt]]:
    made: list[Attempt] = []

    def make(script: str) -> Attempt:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made.append(Attempt(tmp_path, script, alone=True, port=port))
        return made[-1]

    yield make
    for one in made:
        assert process_cleanup.kill_processes(one.token, within_s=GIVE_UP_S) == []


def failed(ended: protocol.Ended) -> list[tuple[int, int]]:
    """Return which ranks failed and with which exit code, the first first."""
    in_order = sorted(ended.failures, key=lambda one: -one.ago_s)
    return [(one.rank, one.exit_code) for one in in_order]


async def until_asked(attempt: Attempt) -> None:
    while "asked to end" not in attempt.output().get(0, ""):
        attempt.changed.clear()
        await asyncio.wait_for(attempt.changed.wait(), GIVE_UP_S)


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", -9), ("SIGSEGV", -11)])
def test_a_rank_that_ignores_the_end_is_killed_after_the_grace(
    attempt: Callable[[str], Attempt], signal: str, code: int
) -> None:
    async def go() -> None:
        one = attempt(ONE_DIES.replace("{signal}", signal))
        running = one.running("linux", **{GRACE_VARIABLE: "1"})
        await running.start()
        watching = asyncio.create_task(running.watch())
        await until_asked(one)
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert failed(ended) == [(1, code), (0, -9)]
        assert (ended.words, ended.killed) == ("", (0,))

    asyncio.run(go())


def test_a_stop_during_the_grace_does_not_hide_the_rank_that_failed(
    attempt: Callable[[str], Attempt],
) -> None:
    async def go() -> None:
        one = attempt(ONE_DIES.replace("{signal}", "SIGKILL"))
        running = one.running("linux", **{GRACE_VARIABLE: "100"})
        await running.start()
        watching = asyncio.create_task(running.watch())
        await until_asked(one)
        running.stop(0.5)  # as the launcher does when another host has failed as well
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert failed(ended)[0] == (1, -9)

    asyncio.run(go())


def test_ranks_that_end_as_asked_have_not_failed(attempt: Callable[[str], Attempt]) -> None:
    async def go() -> RunningAttempt:
        one = attempt("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
        running = one.running("linux", **{GRACE_VARIABLE: "100"})
        await running.start()
        watching = asyncio.create_task(running.watch())
        await one.until_both_spoke()
        running.stop(100.0)
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert failed(ended) == []
        assert "got signal: 15" in ended.words
        return running

    asyncio.run(go())


def test_a_rank_that_leaves_by_exit_code_0_ends_no_other(
    attempt: Callable[[str], Attempt], tmp_path: Path
) -> None:
    async def go() -> None:
        one = attempt(ENDS_EARLY)
        running = one.running("linux", **{GRACE_VARIABLE: "0"})
        await running.start()
        watching = asyncio.create_task(running.watch())
        until = time.monotonic() + GIVE_UP_S
        while psutil.pid_exists(engines.rank_pids(one.share.records).get(1, os.getpid())):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        done, _ = await asyncio.wait({watching}, timeout=1.0)  # it would be ended at once
        assert not done
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert (ended.good, ended.failures) == (True, ())

    asyncio.run(go())
