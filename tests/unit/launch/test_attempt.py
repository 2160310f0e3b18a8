"""Ranks as a node agent starts, hears and ends them."""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent_attempt import Attempt
from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.job import GRACE_VARIABLE
from torchmuster.launch.node import attempt as running_module
from torchmuster.launch.node import process_cleanup, supervisor

MEETING = """\
import os, socket, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(" ".join(f"{key}={os.environ[key]}" for key in keys), sys.argv[1:], flush=True)
"""
ONE_FAILS = """\
import os, signal, time
if os.environ["RANK"] == "5":
    raise ValueError("rank 5 has no data")
print("waiting", flush=True)
time.sleep(600)
"""
STUBBORN = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("waiting", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def adopted_orphans() -> Iterator[Callable[[], list[int]]]:
    """Make this process the parent of orphans, as a node agent is, and yield what lists the living ones."""
    supervisor.adopt_orphans()
    # Earlier tests in this process may have started a fork server.
    earlier = {process.pid for process in supervisor.descendants(os.getpid())}

    def left() -> list[int]:
        below = supervisor.descendants(os.getpid())
        living = {process.pid for process in below if process.state != "Z"}
        return sorted(living - earlier)

    try:
        yield left
    finally:
        ctypes.CDLL(None).prctl(36, 0)


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The runs of a test; at its end no process of theirs may be left, however long each took to die."""
    monkeypatch.setattr(running_module, "_KILL_WITHIN_S", GIVE_UP_S)
    used: list[str] = []
    yield used
    for token in used:
        assert process_cleanup.processes_of(token) == []


def test_every_rank_is_told_who_it_is(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, MEETING)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        ended = await running.watch()
        assert (ended.good, ended.failures, ended.text) == (True, (), "")
        for local_rank, rank in enumerate((4, 5)):
            expected = (
                f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE=6 LOCAL_WORLD_SIZE=2 "
                "MASTER_ADDR=10.0.0.1 ['--lr', '1']\n"
            )
            assert attempt.output()[rank] == expected
            assert (tmp_path / "logs" / f"rank-{rank}.log").read_text() == expected

    asyncio.run(go())


def test_the_first_that_fails_ends_the_others_and_is_named(
    tmp_path: Path, tokens: list[str]
) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, ONE_FAILS)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        ended = await asyncio.wait_for(running.watch(), GIVE_UP_S)
        assert not ended.good
        first = min(ended.failures, key=lambda one: -one.ago_s)
        assert (first.rank, first.exit_code) == (5, 1)
        assert first.error == "ValueError: rank 5 has no data"

    asyncio.run(go())


def test_ranks_that_ignore_the_end_are_killed_after_the_grace(
    tmp_path: Path, tokens: list[str]
) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, STUBBORN)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.stop(0.5)
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert ended.killed == (4, 5)

    asyncio.run(go())


def test_a_rank_gets_one_signal_however_many_reasons_there_are_to_stop(
    tmp_path: Path, tokens: list[str]
) -> None:
    script = """\
import os, pathlib, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
print("waiting", flush=True)
while not got: time.sleep(0.01)
if os.environ["RANK"] == "5": sys.exit(3)
while not pathlib.Path("done").exists(): time.sleep(0.01)
pathlib.Path("got").write_text(str(len(got)))
"""

    async def go() -> None:
        attempt = Attempt(tmp_path, script)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.stop(GIVE_UP_S)
        running.stop(GIVE_UP_S)
        pid = running._ranks[1].pid
        while psutil.pid_exists(pid):  # it fails, for which the others are stopped as well
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        (tmp_path / "done").touch()
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert (tmp_path / "got").read_text() == "1"
        assert ended.killed == ()

    asyncio.run(go())


def test_a_rank_that_fails_while_another_ignores_the_end_does_not_wait_for_ever(
    tmp_path: Path, tokens: list[str]
) -> None:
    script = STUBBORN.replace(
        "time.sleep(600)",
        "import os\nif os.environ['RANK'] == '5': raise ValueError('no data')\ntime.sleep(600)",
    )

    async def go() -> None:
        attempt = Attempt(tmp_path, script)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        ended = await asyncio.wait_for(running.watch(), GIVE_UP_S)
        assert [one.error for one in ended.failures if one.rank == 5] == ["ValueError: no data"]

    try:
        asyncio.run(go())
    finally:
        process_cleanup.kill_processes(tokens[0], within_s=GIVE_UP_S)


def test_a_signal_is_passed_on_to_the_ranks(tmp_path: Path, tokens: list[str]) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('warned', flush=True), sys.exit(0)))\n"
        "print('waiting', flush=True)\ntime.sleep(600)\n"
    )

    async def go() -> None:
        attempt = Attempt(tmp_path, script)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.pass_on("SIGUSR1")
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert ended.good
        assert all(text.endswith("warned\n") for text in attempt.output().values())

    asyncio.run(go())


def test_a_warning_does_not_kill_a_rank_without_a_handler(
    tmp_path: Path, tokens: list[str]
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "def warned(*_):\n"
        "    print('warned', flush=True)\n"
        "    Path('over').touch()\n"
        "if os.environ['LOCAL_RANK'] == '0': signal.signal(signal.SIGUSR1, warned)\n"
        "print('waiting', flush=True)\n"
        "while not Path('over').exists(): time.sleep(0.02)\n"
    )

    async def go() -> None:
        attempt = Attempt(tmp_path, script)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.pass_on("SIGUSR1", only_if_handled=True)
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert ended.good
        texts = attempt.output()
        assert [texts[rank].count("warned") for rank in sorted(texts)] == [1, 0]

    asyncio.run(go())


def test_nothing_listens_beyond_this_machine(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, STUBBORN)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        listening = [
            connection.laddr
            for process in process_cleanup.processes_of(attempt.token)
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == []
        running.stop(0.0)
        await asyncio.wait_for(watching, GIVE_UP_S)

    asyncio.run(go())


# Rank 4 ignores requests to stop and says that it got one; rank 5 then dies without a word of its own.
ONE_DIES = """\
import os, pathlib, signal, time
if os.environ["RANK"] == "4":
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    pathlib.Path("ready").touch()
    while True: time.sleep(600)
while not pathlib.Path("ready").exists(): time.sleep(0.01)
os.kill(os.getpid(), signal.{signal})
"""
ENDS_EARLY = """\
import os, pathlib, time
if os.environ["RANK"] == "5":
    os._exit(0)
while not pathlib.Path("go").exists(): time.sleep(0.01)
"""


def failed(ended: protocol.Ended) -> list[tuple[int, int]]:
    """Return which ranks failed and with which exit code, the first first."""
    in_order = sorted(ended.failures, key=lambda failure: -failure.ago_s)
    return [(failure.rank, failure.exit_code) for failure in in_order]


async def until_asked(attempt: Attempt) -> None:
    while "asked to end" not in attempt.output().get(4, ""):
        attempt.changed.clear()
        await asyncio.wait_for(attempt.changed.wait(), GIVE_UP_S)


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", -9), ("SIGSEGV", -11)])
def test_failing_rank_is_named_and_others_are_killed_after_grace(
    tmp_path: Path, tokens: list[str], signal: str, code: int
) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, ONE_DIES.replace("{signal}", signal))
        tokens.append(attempt.token)
        running = attempt.running(**{GRACE_VARIABLE: "1"})
        await running.start()
        ended = await asyncio.wait_for(running.watch(), GIVE_UP_S)
        assert failed(ended) == [(5, code), (4, -9)]
        assert (ended.text, ended.killed) == ("", (4,))

    asyncio.run(go())


def test_stop_during_grace_does_not_hide_the_failure(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, ONE_DIES.replace("{signal}", "SIGKILL"))
        tokens.append(attempt.token)
        running = attempt.running(**{GRACE_VARIABLE: str(2 * GIVE_UP_S)})
        await running.start()
        watching = asyncio.create_task(running.watch())
        await until_asked(attempt)
        running.stop(0.5)  # as the launcher does when another host has failed as well
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert failed(ended)[0] == (5, -9)

    asyncio.run(go())


def test_ranks_that_end_as_asked_have_not_failed(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, "import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.stop(100.0)
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert (ended.good, failed(ended)) == (False, [])
        assert "SIGTERM" in ended.text

    asyncio.run(go())


def test_exit_code_0_ends_no_other_rank(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, ENDS_EARLY)
        tokens.append(attempt.token)
        running = attempt.running(**{GRACE_VARIABLE: "0"})
        await running.start()
        watching = asyncio.create_task(running.watch())
        pid = running._ranks[1].pid
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.01)
        done, _ = await asyncio.wait({watching}, timeout=1.0)  # it would be ended at once
        assert not done
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert (ended.good, ended.failures) == (True, ())

    asyncio.run(go())


def test_rank_ends_by_its_exit_not_by_its_pipe(tmp_path: Path, tokens: list[str]) -> None:
    """A grandchild without a session, a parent or an environment keeps the pipe open."""
    script = """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
print("done", flush=True)
"""

    async def go() -> None:
        attempt = Attempt(tmp_path, script)
        tokens.append(attempt.token)
        running = attempt.running()
        await running.start()
        ended = await asyncio.wait_for(running.watch(), GIVE_UP_S)
        assert ended.good
        assert attempt.output() == {4: "done\n", 5: "done\n"}

    with adopted_orphans() as left:
        asyncio.run(go())
        assert left() == []
