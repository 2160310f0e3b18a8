"""The search and the survey with forty machines that are asked as real ones are."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose.group_testing import (
    GroupDiagnosis,
    LinkSearch,
    ProbeGroup,
    ProbeResult,
    SuspectedFault,
    find_bad,
)
from torchmuster.diagnose.links import survey as calling
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.messages import (
    Call,
    Called,
    Result,
    Served,
    encode_message,
    read_message,
)
from torchmuster.diagnose.links.model import Figures, Link
from torchmuster.diagnose.links.reaching import serve_all
from torchmuster.diagnose.links.survey import CallingTester, survey_links
from torchmuster.diagnose.rounds import Pair, survey_rounds
from torchmuster.launch import protocol

COUNT = 40
NOT_MEASURED = (5, 18)  # 13 apart


class Machine:
    """Answers as an examiner does; ``network`` says who reaches whom."""

    def __init__(self, place: int, network: "Network") -> None:
        self.name = f"node{place + 1}"
        self.place = place
        self.record: Any = SimpleNamespace(system="linux")
        self._network = network

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        if verb == "serve":
            return encode_message(
                Served(
                    port=40000,
                    addresses=(
                        protocol.Address(address=f"10.0.0.{self.place + 1}", interface="eth0"),
                    ),
                    udp_ports={},
                    interfaces=(),
                    meeting_port=29400 if self.place == 0 else None,
                )
            )
        if verb == "close":
            return {}
        call = read_message(Call, argument)
        others = [int(target.address.rpartition(".")[2]) - 1 for target in call.targets]
        self._network.asked.append((self.place, call))
        return encode_message(
            Called(results=tuple(self._network.result(self.place, one, call) for one in others))
        )


class Network:
    """Good, but for some machines, and for some directions between others."""

    def __init__(
        self, *, dead: Collection[int] = (), blocked: Collection[tuple[int, int]] = ()
    ) -> None:
        self.dead = set(dead)
        self.blocked = set(blocked)
        self.asked: list[tuple[int, Call]] = []
        self.machines = [Machine(place, self) for place in range(COUNT)]

    def result(self, caller: int, called: int, call: Call) -> Result:
        if not self.dead.isdisjoint((caller, called)) or (caller, called) in self.blocked:
            return Result(problem="timeout", seconds=call.timeout_s)
        measured = Figures(bytes_per_s=1e9, round_trips_s=(0.0001,)) if call.measure else None
        return Result(problem="", seconds=0.1, there=measured, back=measured)

    async def tester(self) -> CallingTester:
        found = await serve_all(self.machines, "nonce", None, None)
        addresses = [f"10.0.0.{place + 1}" for place in range(COUNT)]
        return CallingTester(found, addresses, nonce="nonce", timeout_s=1.0)

    def find(self, links: LinkSearch) -> GroupDiagnosis:
        async def run() -> GroupDiagnosis:
            tester = await self.tester()
            return await find_bad(tester, COUNT, links=links, faults=[SuspectedFault.DEAD])

        return asyncio.run(run())

    def surveyed(self) -> list[Link]:
        return asyncio.run(survey_links(self.machines))

    def tries(self, caller: int, called: int) -> int:
        address = f"10.0.0.{called + 1}"
        return sum(
            any(target.address == address for target in call.targets)
            for place, call in self.asked
            if place == caller
        )

    def named(self) -> list[tuple[str, list[str]]]:
        """What is wrong by its finding's name, and the machines that the finding names."""
        return [
            (found.name, re.findall(r"node\d+", found.what))
            for found in judge_links(self.surveyed())
        ]


def both_ways(*pairs: Pair) -> set[tuple[int, int]]:
    return {way for one, other in pairs for way in ((one, other), (other, one))}


# ---- the search


def test_a_good_group_is_left_alone() -> None:
    found = Network().find(LinkSearch.EVERY)
    assert (found.bad_nodes, found.bad_links, found.undecided) == ({}, {}, ())
    # All in pairs once, then everybody with everybody.
    assert found.rounds == 1 + math.ceil(math.log2(COUNT))


def test_dead_machines_are_found_by_calling() -> None:
    found = Network(dead=[3, 4, 17, 39]).find(LinkSearch.COLLECTIVES)
    assert found.bad_nodes == dict.fromkeys([3, 4, 17, 39], SuspectedFault.DEAD)
    assert found.bad_links == {}


@pytest.mark.parametrize("links", [LinkSearch.COLLECTIVES, LinkSearch.EVERY])
def test_dead_links_that_collectives_use_are_found_by_calling(links: LinkSearch) -> None:
    pairs = [(5, 6), (10, 26), (0, 39)]
    found = Network(blocked=both_ways(*pairs)).find(links)
    assert (found.bad_nodes, found.bad_links) == ({}, dict.fromkeys(pairs, SuspectedFault.DEAD))


def test_dead_links_that_collectives_do_not_use_are_found_by_calling() -> None:
    found = Network(blocked=both_ways(NOT_MEASURED, (1, 30))).find(LinkSearch.EVERY)
    assert (found.bad_nodes, found.bad_links) == (
        {},
        {NOT_MEASURED: SuspectedFault.DEAD, (1, 30): SuspectedFault.DEAD},
    )


def test_a_machine_has_only_so_many_calls_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MOST_CALLS", 7)
    network = Network(blocked=[(19, 39)])

    async def run() -> Any:
        meeting = ProbeGroup(range(20), range(20, COUNT))
        return await (await network.tester()).test([meeting], without=frozenset())

    (outcome,) = asyncio.run(run())
    assert (outcome.seen, outcome.blamed) == (ProbeResult.FAILED, {(19, 39)})
    assert max(len(call.targets) for _, call in network.asked) == 7
    # All at first, and twice again the one that was not answered.
    assert sum(len(call.targets) for _, call in network.asked) == 2 * 20 * 20 + 2
    # Nobody is the first whom all call.
    first = Counter(call.targets[0].address for _, call in network.asked[: COUNT // 2])
    assert max(first.values()) < COUNT / 4


# ---- the survey


def test_a_large_group_is_measured_where_collectives_go_and_called_everywhere() -> None:
    network = Network()
    surveyed = network.surveyed()
    pairs = {pair for turn in survey_rounds(COUNT) for pair in turn}
    to_the_first = {(place, 0) for place in range(1, COUNT)}
    assert {link.places for link in surveyed} == both_ways(*pairs) | to_the_first
    assert {link.places for link in surveyed if link.figures} == both_ways(*pairs)
    assert len(pairs) < COUNT * (COUNT - 1) / 2 / 2
    assert judge_links(surveyed) == []
    called = {
        (caller, int(target.address.rpartition(".")[2]) - 1)
        for caller, call in network.asked
        for target in call.targets
    }
    assert len(called) == COUNT * (COUNT - 1)
    unmeasured = Counter(caller for caller, call in network.asked if not call.measure)
    assert max(unmeasured.values()) == 2 + math.ceil(math.log2(COUNT))


def test_a_dead_link_that_is_measured_is_named() -> None:
    network = Network(blocked=both_ways((10, 26)))
    assert network.named() == [("blocked-dropped", ["node11", "node27"])]
    # Known for that after two tries, it is left out of the search: each further one costs a deadline.
    assert network.tries(10, 26) == 2


def test_a_dead_link_that_collectives_do_not_use_is_named() -> None:
    network = Network(blocked=both_ways(NOT_MEASURED))
    assert network.named() == [("blocked-dropped", ["node6", "node19"])]


def test_a_link_that_is_dead_in_one_direction_is_named_with_it(snapshot: SnapshotAssertion) -> None:
    (found,) = judge_links(Network(blocked=[NOT_MEASURED]).surveyed())
    assert found.name == "blocked-dropped"
    assert found == snapshot


def test_dead_machines_and_dead_links_are_told_apart() -> None:
    network = Network(dead=[7, 30], blocked=both_ways(NOT_MEASURED, (10, 26)))
    named = network.named()
    assert {name for name, _ in named} == {"blocked-dropped"}
    assert sorted(machines for _, machines in named) == [
        ["node11", "node27"],
        ["node31"],
        ["node6", "node19"],
        ["node8"],
    ]


def test_a_machine_that_dies_while_the_others_call_is_named() -> None:
    class Dying(Network):
        def result(self, caller: int, called: int, call: Call) -> Result:
            if len(self.asked) > COUNT:
                self.dead = {20}
            return super().result(caller, called, call)

    assert Dying().named() == [("blocked-dropped", ["node21"])]


def test_a_call_that_fails_now_and_then_accuses_nobody() -> None:
    class Shaky(Network):
        def result(self, caller: int, called: int, call: Call) -> Result:
            seen = sum(one == caller for one, _ in self.asked)
            self.blocked = set() if (seen + caller) % 4 else {(caller, (caller + 13) % COUNT)}
            return super().result(caller, called, call)

    assert Shaky().named() == []


def test_where_half_of_a_group_is_cut_off_no_search_is_made() -> None:
    halves = {(one, other) for one in range(20) for other in range(20, COUNT)}
    network = Network(blocked=both_ways(*halves))
    surveyed = network.surveyed()
    pairs = {pair for turn in survey_rounds(COUNT) for pair in turn}
    assert {link.places for link in surveyed if link.problem} == {
        places
        for places in both_ways(*pairs) | {(place, 0) for place in range(1, COUNT)}
        if places in network.blocked
    }
    unmeasured = Counter(caller for caller, call in network.asked if not call.measure)
    assert max(unmeasured.values()) == 2  # who was silent is called twice
