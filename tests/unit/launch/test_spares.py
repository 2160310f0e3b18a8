"""Which spare replaces a host that fails, and what happens if there is none."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history import failure_report, run_state
from torchmuster.launch.history.run_state import SPARE_REFUSED, TAKEOVER
from torchmuster.launch.launcher.node_handle import NodeHandle, WaitingMessages
from torchmuster.launch.launcher.node_registry import NodeRegistry
from torchmuster.launch.launcher.spares import (
    Candidate,
    SparePool,
    broken_hosts,
    choose_spare,
    takeover_text,
)
from torchmuster.launch.transports.channel import Arrive
from torchmuster.runfolder import RunFolder, create_run_folder

HOSTS = ("a", "b", "c", "d")
OWN = protocol.Address(address="10.0.0.1", interface="eth0")


def record(name: str) -> protocol.NodeRecord:
    return protocol.NodeRecord(
        host=name,
        user="ana",
        pid=1,
        system="linux",
        machine="x86_64",
        python="3.11.7",
        torch="2.13.0",
        torchmuster="0",
        cores=8,
        clock_unix_s=0.0,
        addresses=(OWN,),
    )


# ---- the choice


def test_the_first_healthy_spare_with_the_fewest_failures_is_taken() -> None:
    spares = [
        Candidate(place=2, name="c", ranks=8, failures=1),
        Candidate(place=3, name="d", ranks=8),
        Candidate(place=4, name="e", ranks=8),
    ]
    assert choose_spare(spares, ranks=8).value == 3


@pytest.mark.parametrize(
    ("spare", "why"),
    [
        (Candidate(place=2, name="c", ranks=8, failures=2), "failed twice"),
        (Candidate(place=2, name="c", ranks=4), "4 ranks"),
        (Candidate(place=2, name="c", ranks=8, unfit="is not healthy: no disk"), "no disk"),
    ],
)
def test_a_spare_that_does_not_fit_is_not_taken_and_it_says_why(spare: Candidate, why: str) -> None:
    chosen = choose_spare([spare], ranks=8)
    assert chosen.value is None
    assert why in chosen.reason
    other = Candidate(place=9, name="x", ranks=8)
    assert choose_spare([spare, other], ranks=8).value == 9


def test_the_message_names_host_cause_spare_ranks_and_what_is_left() -> None:
    said = takeover_text("c", "no heartbeat for 10 s", "e", lost=True, ranks=range(16, 24), left=1)
    assert said == (
        "host c is lost: no heartbeat for 10 s; spare e takes its place (ranks 16-23), 1 spare left"
    )


def test_a_host_with_a_broken_gpu_is_replaced_but_not_one_whose_script_fails() -> None:
    async def nodes() -> list[NodeHandle]:
        made = [NodeHandle(place, name, None, name) for place, name in enumerate("abc")]  # type: ignore[arg-type]
        errors = ("CUDA error: uncorrectable ECC error encountered", "ValueError: row 7")
        for node, error in zip(made, errors, strict=False):
            failure = protocol.Failure(
                rank=0, local_rank=0, exit_code=1, ago_s=0.0, error=error, traceback=error
            )
            node.ended = protocol.Ended(attempt=0, good=False, failures=(failure,))
        made[2].lose("no heartbeat")
        return made

    found = broken_hosts(asyncio.run(nodes()))
    assert found.keys() == {0, 2}
    assert found[2] == "no heartbeat"


def test_the_timeline_of_a_run_shows_spares_and_takeovers() -> None:
    started = {"ranks": 2, "attempt": 0, "hosts": ["a 1", "b 1"], "spares": ["c"]}
    events = [
        run_state.RunEvent(at_unix_s=1.0, name="started", facts=started),
        run_state.RunEvent(at_unix_s=2.0, name=TAKEOVER, facts={"what": "spare c takes over"}),
    ]
    shown = [failure_report.failure_text(event) for event in events]
    assert shown == ["2 ranks started: a 1, b 1; spares: c", "spare c takes over"]


# ---- the pool


class Machine:
    """A channel to a host that says hello and prepares."""

    def __init__(self, name: str) -> None:
        self._says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self._says.put_nowait(protocol.Hello(protocol=protocol.PROTOCOL, record=record(name)))

    async def send(self, message: protocol.ToAgent) -> None:
        pass

    async def receive(self) -> protocol.FromAgent | None:
        return await self._says.get()

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        pass


class Hosts:
    """A transport of four hosts; those in ``away`` never come."""

    def __init__(self, away: Sequence[int] = ()) -> None:
        self._away = away
        self.again: list[int] = []
        self._arrive: Arrive

    places = HOSTS

    async def open(self, arrive: Arrive) -> None:
        self._arrive = arrive
        for place, name in enumerate(HOSTS):
            if place not in self._away:
                arrive(place, Machine(name))

    async def reopen(self, place: int) -> None:
        self.again.append(place)
        if place not in self._away:
            self._arrive(place, Machine(HOSTS[place]))

    def waiting_for(self, place: int) -> str:
        return "it is called"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return (
            protocol.Trouble(name="host-unreachable", what=f"{HOSTS[place]} is off")
            if place in self._away
            else None
        )

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        pass


class Health:
    """What the health test of each host says."""

    def __init__(self, ill: Sequence[str] = ()) -> None:
        self._ill = ill
        self.asked: list[tuple[str, bool]] = []

    async def __call__(self, node: NodeHandle, *, whole: bool) -> list[Finding]:
        self.asked.append((node.name, whole))
        bad = node.name in self._ill
        return [Finding(name="disk", status=Status.FAILURE, what="no disk")] if bad else []


Scene = Callable[[NodeRegistry, SparePool], Awaitable[None]]


def play(
    folder: Path,
    scene: Scene,
    *,
    spares: int = 2,
    away: Sequence[int] = (),
    health: Health | None = None,
) -> tuple[list[str], RunFolder]:
    """Let hosts join, of which the last are spares, and play a scene."""
    said: list[str] = []
    run = create_run_folder(folder, "x")

    async def prepare(nodes: Sequence[NodeHandle]) -> None:
        for node in nodes:
            node.prepared = protocol.Prepared(
                ranks=2, devices=("CPU",), reasons=(), fingerprint=None
            )

    async def story() -> None:
        hosts = Hosts(away)
        registry = NodeRegistry(
            hosts,
            WaitingMessages(said.append),
            token="t",
            join_s=30.0,
            lost_after_s=None,
            on_output=lambda *_: None,
            spares=spares,
        )
        await hosts.open(registry.arrive)
        await registry.call(range(len(HOSTS)))
        await prepare([*registry.nodes, *registry.spares])
        pool = SparePool(
            registry,
            run,
            say=said.append,
            prepare=prepare,
            is_running=lambda: False,
            examine=health or Health(),
        )
        try:
            async with pool:
                await scene(registry, pool)
        finally:
            await registry.close()

    asyncio.run(story())
    return said, run


def names(nodes: Sequence[NodeHandle]) -> list[str]:
    return [node.name for node in nodes]


def lose(registry: NodeRegistry, place: int) -> dict[int, str]:
    node = registry.at(place)
    assert node is not None
    node.lose("its power is off")
    return broken_hosts(registry.nodes)


def test_the_last_hosts_wait_and_one_gets_the_node_rank_of_a_lost_host(tmp_path: Path) -> None:
    health = Health()

    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        assert (names(registry.nodes), names(registry.spares)) == (["a", "b"], ["c", "d"])
        await pool.take_over(lose(registry, 0))
        assert (names(registry.nodes), names(registry.spares)) == (["c", "b"], ["d"])
        assert not await registry.call_back_the_lost()  # nobody has to be waited for

    said, run = play(tmp_path, scene, health=health)
    (taken,) = [one for one in run_state.read_events(run) if one.name == TAKEOVER]
    assert (taken.facts["host"], taken.facts["spare"]) == ("a", "c")
    assert (taken.facts["ranks"], taken.facts["spares_left"]) == ([0, 1], 1)
    assert any(line.startswith("host a is lost: its power is off; spare c") for line in said)
    assert health.asked == [("c", True)]  # it had not been tested when it joined


def test_a_spare_that_is_not_healthy_is_passed_over(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        await pool.take_over(lose(registry, 1))
        assert names(registry.nodes) == ["a", "d"]

    _, run = play(tmp_path, scene, health=Health(ill=["c"]))
    (refused,) = [one for one in run_state.read_events(run) if one.name == SPARE_REFUSED]
    assert (refused.facts["host"], refused.facts["why"]) == ("c", "no disk")


def test_without_a_spare_the_lost_host_keeps_its_place_and_is_called_back(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        await pool.take_over(lose(registry, 1))
        assert registry.missing == [1]
        back = await registry.call_back_the_lost()
        assert (names(back), names(registry.nodes)) == (["b"], ["a", "b"])

    said, run = play(tmp_path, scene, health=Health(ill=["c", "d"]))
    (taken,) = [one for one in run_state.read_events(run) if one.name == TAKEOVER]
    assert (taken.facts["host"], taken.facts["spare"]) == ("b", None)
    assert any("no spare can replace b" in line for line in said)


def test_a_host_that_failed_twice_is_not_taken_again(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        await pool.take_over(lose(registry, 0))  # c has its place
        await pool.take_over(lose(registry, 2))  # d has
        old = registry.at(0)
        assert old is not None
        await registry._call_anew(old)  # a is back, as a spare
        while names(registry.spares) != ["a"]:
            await asyncio.sleep(0.01)
        await pool.take_over(lose(registry, 3))
        assert names(registry.nodes) == ["a", "b"]
        await pool.take_over(lose(registry, 0))
        assert names(registry.nodes) == ["a", "b"]  # none is left: it keeps its place

    _, run = play(tmp_path, scene)
    events = run_state.read_events(run)
    taken = [one.facts["spare"] for one in events if one.name == TAKEOVER]
    assert taken == ["c", "d", "a", None]


def test_a_host_that_failed_twice_is_given_up_if_a_spare_replaces_it(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        pool._failures[0] = 1
        await pool.take_over(lose(registry, 0))
        assert names(registry.nodes) == ["c", "b"]
        assert registry.at(0) is None
        assert not registry.call_spares_again()

    _, run = play(tmp_path, scene)
    (refused,) = [one for one in run_state.read_events(run) if one.name == SPARE_REFUSED]
    assert refused.facts["host"] == "a"


def test_a_spare_takes_the_place_of_a_host_that_never_joined(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        assert registry.missing == [1]
        await pool.take_over({})
        assert names(registry.nodes) == ["a", "c"]

    play(tmp_path, scene, away=[1])


def test_a_spare_that_never_joined_does_not_hold_up_the_run(tmp_path: Path) -> None:
    async def scene(registry: NodeRegistry, pool: SparePool) -> None:
        assert (names(registry.nodes), names(registry.spares)) == (["a", "b"], ["d"])

    play(tmp_path, scene, away=[2])
