"""Ranks without torchrun's agent, as on Windows: started, listened to and ended by the node agent itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent_attempt import Attempt
from patience import GIVE_UP_S
from torchmuster.launch.node import attempt as running_module
from torchmuster.launch.node import engines, process_cleanup
from torchmuster.launch.node.engines import DirectEngine, TorchrunEngine, engine_for

MEETING = """\
import os, socket, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "USE_LIBUV")
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


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The runs of a test; at its end no process of theirs may be left, however long each took to die."""
    monkeypatch.setattr(running_module, "_KILL_WITHIN_S", GIVE_UP_S)
    used: list[str] = []
    yield used
    for token in used:
        assert process_cleanup.processes_of(token) == []


def test_only_windows_does_without_torchrun(tmp_path: Path) -> None:
    share = Attempt(tmp_path, "").share
    assert isinstance(engine_for(share, {}, "win32"), DirectEngine)
    assert isinstance(engine_for(share, {}, "linux"), TorchrunEngine)
    assert isinstance(engine_for(share, {}, "darwin"), TorchrunEngine)


def test_every_rank_is_told_who_it_is(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, MEETING)
        tokens.append(attempt.token)
        running = attempt.running("win32")
        await running.start()
        ended = await running.watch()
        assert (ended.good, ended.failures, ended.words) == (True, (), "")
        for local_rank, rank in enumerate((4, 5)):
            expected = (
                f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE=6 LOCAL_WORLD_SIZE=2 "
                "MASTER_ADDR=10.0.0.1 USE_LIBUV=0 ['--lr', '1']\n"
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
        running = attempt.running("win32")
        await running.start()
        ended = await asyncio.wait_for(running.watch(), GIVE_UP_S)
        assert not ended.good
        first = min(ended.failures, key=lambda one: -one.ago_s)
        assert (first.rank, first.local_rank, first.exit_code) == (5, 1, 1)
        assert first.error == "ValueError: rank 5 has no data"

    asyncio.run(go())


def test_ranks_that_ignore_the_end_are_killed_after_the_grace(
    tmp_path: Path, tokens: list[str]
) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, STUBBORN)
        tokens.append(attempt.token)
        running = attempt.running("win32")
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
        running = attempt.running("win32")
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.stop(GIVE_UP_S)
        running.stop(GIVE_UP_S)
        pid = engines.rank_pids(attempt.share.records)[5]
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
        running = attempt.running("win32")
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
        running = attempt.running("win32")
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
        running = attempt.running("win32")
        await running.start()
        watching = asyncio.create_task(running.watch())
        await attempt.until_both_spoke()
        running.warn("SIGUSR1")
        ended = await asyncio.wait_for(watching, GIVE_UP_S)
        assert ended.good
        texts = attempt.output()
        assert [texts[rank].count("warned") for rank in sorted(texts)] == [1, 0]

    asyncio.run(go())


def test_nothing_listens_beyond_this_machine(tmp_path: Path, tokens: list[str]) -> None:
    async def go() -> None:
        attempt = Attempt(tmp_path, STUBBORN)
        tokens.append(attempt.token)
        running = attempt.running("win32")
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
