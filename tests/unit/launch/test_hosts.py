"""Which hosts run the next attempt, and how hosts join, are refused, are lost and come back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MachineLost
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec, Limits, NodeCounts
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import Candidate, Hosts, choose_hosts
from torchmuster.launch.launcher.waiting import Waiting
from torchmuster.launch.transports.channel import Arrive

NAMES = ("a", "b", "c", "d")
RECORD = protocol.NodeRecord(
    host="n",
    system="linux",
    python="3.11.7",
    torch="2.13.0",
    torchmuster="0",
    cores=8,
    clock_unix_s=0.0,
    addresses=(),
)


def candidates(text: str) -> list[Candidate]:
    """Return hosts from ``a b! c:4``: an exclamation mark for each failure, and the ranks if not 8."""
    found = []
    for word in text.split():
        name, _, ranks = word.partition(":")
        found.append(
            Candidate(place=NAMES.index(name[0]), ranks=int(ranks or 8), failures=name.count("!"))
        )
    return found


@pytest.mark.parametrize(
    ("present", "nodes", "before", "chosen"),
    [
        ("a b c d", "2", "a b", "a b"),  # c and d are spares
        ("a c d", "2", "a b", "a c"),  # a spare gets the node rank of a host that is away
        ("b c d", "2", "a b", "c b"),
        ("a! b c d", "2", "a b", "c b"),  # or that failed although it is here
        ("a! b", "2", "a b", "a b"),  # unless there is no spare
        ("a! b c!! d!", "2", "a b", "a b"),  # of those that failed equally often, the first
        ("a! b c!!", "2", "a b", "a b"),  # failed twice: not taken while there are others
        ("a!! b!!", "2", "a b", "a b"),  # but taken if there are too few
        ("a c:4 d", "2", "a b", "a d"),  # a spare has as many ranks
        ("a c:4", "2", "a b", None),
        ("b", "2", "a b", None),
        ("", "1", "a", None),
        ("a c", "2:4", "a b c d", "a c"),  # a range goes on with fewer
        ("a b c", "2:4", "a c", "a c b"),  # and takes those that come back
        ("a c:4", "2:4", "a b", "a c"),  # with any number of ranks
        ("a", "2:4", "a b c d", None),
    ],
)
def test_the_hosts_of_the_next_attempt(
    present: str, nodes: str, before: str, chosen: str | None
) -> None:
    least, _, most = nodes.partition(":")
    wanted = NodeCounts(least=int(least), most=int(most or least))
    places = choose_hosts(candidates(present), wanted, candidates(before))
    named = None if places is None else " ".join(NAMES[place] for place in places)
    assert named == chosen


class Machine:
    """A channel to a machine that says hello and is let go of as the test wants it."""

    def __init__(
        self, letting_go: Callable[[], Awaitable[object]], *, version: int = protocol.PROTOCOL
    ) -> None:
        self._letting_go = letting_go
        self.says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self.says.put_nowait(protocol.Hello(protocol=version, record=RECORD))

    async def send(self, message: protocol.ToAgent) -> None:
        pass

    async def receive(self) -> protocol.FromAgent | None:
        return await self.says.get()

    def say_alive(self) -> None:
        pass

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        await self._letting_go()


async def at_once() -> None:
    pass


async def never() -> None:
    await asyncio.Event().wait()


class Called:
    """A transport of machines; those that are called again let go at once."""

    def __init__(
        self, letting_go: Callable[[], Awaitable[object]] = at_once, *, names: str = "abc"
    ) -> None:
        self.machines = [Machine(letting_go) for _ in names]
        self.again: list[int] = []
        self.away: set[int] = set()  # do not connect
        self._failed: set[int] = set()
        self.places: Sequence[str] = list(names)
        self._arrive: Arrive

    async def open(self, arrive: Arrive) -> None:
        self._arrive = arrive
        for place, machine in enumerate(self.machines):
            if place in self.away:
                self._failed.add(place)
            else:
                arrive(place, machine)

    async def reopen(self, place: int) -> None:
        self.again.append(place)
        self._failed.discard(place)
        if place in self.away:
            self._failed.add(place)
        else:
            self._arrive(place, Machine(at_once))

    def waiting_for(self, place: int) -> str:
        return "it is called"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        if place not in self._failed:
            return None
        return protocol.Trouble(
            name="host-unreachable", what=f"cannot connect to {place}", why="off"
        )

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        pass


Scene = Callable[[Hosts, Called, Waiting], Awaitable[None]]


def play(called: Called, scene: Scene, *, spares: int = 0, least: int | None = None) -> None:
    """Let the machines join and play a scene."""
    limits = Limits(join_s=GIVE_UP_S, return_s=0.3)
    spec = JobSpec(
        name="x",
        command=("x.py",),
        folder="/",
        spares=spares,
        min_nodes=least,
        limits=limits,
    )

    async def run() -> None:
        waiting = Waiting()
        hosts = Hosts(spec, called, waiting, token="t", on_message=lambda *_: None)
        await called.open(hosts.arrive)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await scene(hosts, called, waiting)
        finally:
            await hosts.close()

    asyncio.run(run())


async def begin(hosts: Hosts) -> list[ConnectedHost]:
    await hosts.wait()
    return again(hosts)


def again(hosts: Hosts) -> list[ConnectedHost]:
    places = hosts.choose()
    assert places is not None
    return hosts.take(places)


def names(nodes: Sequence[ConnectedHost]) -> list[str]:
    return [node.name for node in nodes]


def test_a_host_that_is_lost_while_others_are_awaited_ends_the_wait() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        called.machines[1].says.put_nowait(None)  # it has joined, and is lost
        with pytest.raises(MachineLost, match="b is lost"):
            await hosts.wait()

    called = Called()
    called.machines[2].says = asyncio.Queue()  # it never joins
    play(called, scene)


def test_a_machine_of_another_protocol_is_refused_although_it_is_the_last_to_come() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        with pytest.raises(Impossible, match=r"torchmuster on c uses protocol"):
            await hosts.wait()

    called = Called()
    called.machines[2] = Machine(at_once, version=protocol.PROTOCOL + 97)
    play(called, scene)


def test_lost_hosts_are_called_again_and_keep_their_node_ranks() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        for node in await begin(hosts):
            node.lose("the link is cut")
        hosts.free(range(3))
        assert hosts.choose() is None
        await hosts.wait()
        assert names(again(hosts)) == ["a", "b", "c"]
        assert sorted(called.again) == [0, 1, 2]

    play(Called(), scene)


def test_a_range_continues_without_a_host_until_it_comes_back() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        nodes = await begin(hosts)
        called.away = {1}
        nodes[1].lose("its power is off")
        hosts.free([1])
        await hosts.wait()
        assert names(again(hosts)) == ["a", "c"]
        assert (hosts.missing, hosts.idle) == (["b"], [])
        called.away = set()
        while not hosts.idle:
            await asyncio.sleep(0.05)
        hosts.free()
        assert names(again(hosts)) == ["a", "c", "b"]
        assert hosts.missing == []

    play(Called(), scene, least=2)


def test_the_last_hosts_are_spares_and_one_that_never_joins_does_not_hold_up_the_run() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        assert names(await begin(hosts)) == ["a", "b"]
        assert names(hosts.idle) == ["d"]

    called = Called(names="abcd")
    called.away = {2}
    play(called, scene, spares=2)


def test_a_spare_takes_the_place_of_a_host_that_never_joined() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        assert names(await begin(hosts)) == ["c", "b"]

    called = Called()
    called.away = {0}
    play(called, scene, spares=1)


def test_without_spares_a_host_that_cannot_be_reached_ends_the_run() -> None:
    async def scene(hosts: Hosts, called: Called, _: Waiting) -> None:
        with pytest.raises(Exception, match="cannot connect to 1"):
            await hosts.wait()

    called = Called()
    called.away = {1}
    play(called, scene)
