"""What is tested, said and logged about hosts that replace others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from patience import GIVE_UP_S
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.history.run_state import SPARE_READY, SPARE_REFUSED, TAKEOVER
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import Hosts
from torchmuster.launch.launcher.newcomers import Newcomers
from torchmuster.launch.launcher.waiting import Waiting
from torchmuster.runfolder import RunFolder, create_run_folder
from unit.launch.test_hosts import Called, names


class Pool:
    """Hosts a, b, c, d, of which the last two are spares."""

    def __init__(self, folder: Path, refusing: str = "") -> None:
        self._refusing = refusing
        self.run: RunFolder = create_run_folder(folder, "x")
        self.called = Called(names="abcd")
        spec = JobSpec(
            name="x",
            command=("x.py",),
            folder="/",
            spares=2,
            limits=Limits(join_s=GIVE_UP_S, return_s=0.3),
        )
        self.hosts = Hosts(spec, self.called, Waiting(), token="t", on_message=lambda *_: None)
        self.newcomers = Newcomers(self.hosts, self.run, prepare=self.prepare)

    async def prepare(self, nodes: Sequence[ConnectedHost]) -> None:
        for node in nodes:
            if node.name in self._refusing:
                raise MusterError("no disk")
            node.prepared = protocol.Prepared(ranks=2, devices=("CPU",), fingerprint=None)

    async def next_hosts(self, *broken: str) -> list[str]:
        """Let these hosts be lost, and return those of the next attempt."""
        for node in self.hosts.in_use:
            if node.name in broken:
                node.lose("its power is off")
        lost = {node.place: node.why_lost for node in self.hosts.in_use if node.why_lost}
        self.hosts.free(lost)
        return names(await self.newcomers.choose(lost))

    def events(self, name: str) -> list[dict[str, object]]:
        return [event.facts for event in run_state.read_events(self.run) if event.name == name]


def play(folder: Path, scene: Callable[[Pool], Awaitable[None]], refusing: str = "") -> Pool:
    async def run() -> Pool:
        pool = Pool(folder, refusing)
        await pool.called.open(pool.hosts.arrive)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await pool.hosts.wait()
                assert await pool.next_hosts() == ["a", "b"]
                await scene(pool)
        finally:
            await pool.hosts.close()
        return pool

    return asyncio.run(run())


def test_a_spare_gets_the_node_rank_of_a_lost_host(tmp_path: Path) -> None:
    async def scene(pool: Pool) -> None:
        assert await pool.next_hosts("a") == ["c", "b"]

    (taken,) = play(tmp_path, scene).events(TAKEOVER)
    assert (taken["host"], taken["spare"]) == ("a", "c")
    assert taken["what"] == "host a is lost: its power is off; spare c takes its place"


def test_a_spare_that_cannot_run_ranks_is_passed_over(tmp_path: Path) -> None:
    async def scene(pool: Pool) -> None:
        assert await pool.next_hosts("b") == ["a", "d"]

    refused = play(tmp_path, scene, "c").events(SPARE_REFUSED)[0]
    assert (refused["host"], refused["why"]) == ("c", "no disk")


def test_spares_are_prepared_while_the_ranks_run(tmp_path: Path) -> None:
    async def scene(pool: Pool) -> None:
        async with pool.newcomers.looked_after(None):
            while len(pool.events(SPARE_READY)) < 2:
                await asyncio.sleep(0.05)

    pool = play(tmp_path, scene)
    assert [event["host"] for event in pool.events(SPARE_READY)] == ["c", "d"]


def test_a_host_that_comes_back_makes_ranks_save_that_can(tmp_path: Path) -> None:
    async def run() -> None:
        called = Called()
        spec = JobSpec(
            name="x",
            command=("x.py",),
            folder="/",
            min_nodes=2,
            limits=Limits(join_s=GIVE_UP_S, return_s=0.3),
        )
        hosts = Hosts(spec, called, Waiting(), token="t", on_message=lambda *_: None)
        asked = asyncio.Event()

        async def prepare(nodes: Sequence[ConnectedHost]) -> None:
            for node in nodes:
                node.prepared = protocol.Prepared(ranks=2, devices=("CPU",), fingerprint=None)

        newcomers = Newcomers(hosts, create_run_folder(tmp_path, "x"), prepare=prepare)
        called.away = {2}
        await called.open(hosts.arrive)
        try:
            await hosts.wait()
            assert names(await newcomers.choose({})) == ["a", "b"]
            called.away = set()
            async with newcomers.looked_after(asked.set):
                await asyncio.wait_for(asked.wait(), GIVE_UP_S)
            hosts.free()
            assert names(await newcomers.choose({})) == ["a", "b", "c"]
        finally:
            await hosts.close()

    asyncio.run(run())
