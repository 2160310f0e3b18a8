"""The course of a survey, with machines that are made up: what is requested of them, and what is tried again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import Dial, Dialed, Link, Open, Opened, Problem
from torchmuster.diagnose.links.survey import links_not_tried, survey_links
from torchmuster.errors import MachineLost, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.protocol import Address, Target
from unit.diagnose.links.made_up import GOOD

# How a dial goes: from one machine to an address and port of another.
Answer = Callable[["MadeUp", Target, Dial], Dialed]


def well(caller: "MadeUp", target: Target, request: Dial) -> Dialed:
    return Dialed(problem=Problem.NONE, speed=GOOD if request.measure else None)


class MadeUp:
    """A machine that answers as a test says."""

    def __init__(self, place: int, answer: Answer = well, *, addresses: Sequence[str] = ()) -> None:
        self.name, self.place = f"node{place + 1}", place
        self.record = protocol.NodeRecord(
            host=self.name,
            system="linux",
            python="3.11",
            torch=None,
            torchmuster="0",
            cores=2,
            clock_unix_s=0.0,
            addresses=(),
        )
        self.addresses = list(addresses) or [f"10.0.0.{place + 1}"]
        self.answer = answer
        self.verbs: list[str] = []
        self.measured = 0

    async def ask(self, verb: str, argument: Any, kind: Any, *, within_s: float) -> Any:
        self.verbs.append(verb)
        await asyncio.sleep(0)
        if verb == "open":
            return self.open(argument)
        if verb == "dial":
            self.measured += argument.measure
            return [self.answer(self, target, argument) for target in argument.targets]
        return None

    def open(self, request: Open) -> Opened:
        addresses = []
        for number, address in enumerate(self.addresses):
            addresses.append(Address(address=address, interface=f"eth{number}"))
        return Opened(
            port=40000 + self.place,
            addresses=tuple(addresses),
            ephemeral_ports=(32768, 60999),
            rendezvous_port=29400 if request.rendezvous else None,
        )


def surveyed(machines: Sequence[MadeUp]) -> dict[tuple[int, int], Link]:
    return {link.places: link for link in asyncio.run(survey_links(machines))}


def test_all_directions_are_tried_and_each_pair_of_the_ring_is_measured_once() -> None:
    machines = [MadeUp(place) for place in range(4)]
    links = surveyed(machines)
    assert set(links) == {(one, other) for one in range(4) for other in range(4) if one != other}
    assert sum(machine.measured for machine in machines) == 4
    ring = {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert {tuple(sorted(places)) for places, link in links.items() if link.speed} == ring
    assert all(one.verbs[0] == "open" and one.verbs[-1] == "close" for one in machines)
    assert judge_links(list(links.values())) == []
    assert links_not_tried(list(links.values())) == []


@pytest.mark.parametrize("problem", [Problem.NONE, Problem.REFUSED])
def test_the_address_counts_that_is_reached_or_to_which_packets_get_closest(
    problem: Problem,
) -> None:
    def second_network(caller: MadeUp, target: Target, request: Dial) -> Dialed:
        if target.address.startswith("192.168."):
            return Dialed(problem=Problem.ABSENT, seconds=3.0)
        return replace(well(caller, target, request), problem=problem)

    machines = []
    for place in range(2):
        addresses = [f"192.168.0.{place}", f"10.0.0.{place}"]
        machines.append(MadeUp(place, second_network, addresses=addresses))
    link = surveyed(machines)[0, 1]
    assert (link.problem, link.address) == (problem, Address(address="10.0.0.1", interface="eth1"))


def test_silence_is_tried_again() -> None:
    silent: list[str] = []

    def once(caller: MadeUp, target: Target, request: Dial) -> Dialed:
        if not request.measure and target.address not in silent:
            silent.append(target.address)
            return Dialed(problem=Problem.TIMEOUT, seconds=5.0)
        return well(caller, target, request)

    links = surveyed([MadeUp(0, once), MadeUp(1, once)])
    assert silent
    assert judge_links(list(links.values())) == []


def test_what_looks_bad_is_measured_again_and_the_best_try_counts() -> None:
    rates = iter([1e6, 1e6, 1e9])

    def better(caller: MadeUp, target: Target, request: Dial) -> Dialed:
        if not request.measure:
            return well(caller, target, request)
        return Dialed(problem=Problem.NONE, speed=replace(GOOD, bytes_per_s=next(rates)))

    links = surveyed([MadeUp(0, better), MadeUp(1, better)])
    assert next(rates, None) is None
    assert judge_links(list(links.values())) == []


def test_a_machine_that_opens_no_port_is_named_and_the_others_are_measured() -> None:
    class Broken(MadeUp):
        def open(self, request: Open) -> Opened:
            raise MusterError("node2: no free port")

    links = surveyed([MadeUp(0), Broken(1), MadeUp(2)])
    assert links[0, 1].problem == links[1, 2].problem == "not-tried"
    assert links[0, 2].speed == GOOD
    assert links_not_tried(list(links.values())) == ["the links of node2: node2: no free port"]


def test_a_machine_that_is_lost_in_the_middle_does_not_end_the_survey() -> None:
    class Lost(MadeUp):
        async def ask(self, verb: str, argument: Any, kind: Any, *, within_s: float) -> Any:
            if verb != "open":
                raise MachineLost("node2 lost its probe program")
            return await super().ask(verb, argument, kind, within_s=within_s)

    links = surveyed([MadeUp(0), Lost(1), MadeUp(2)])
    assert links[0, 2].speed == links[0, 1].speed == GOOD
    assert links[1, 0].problem == "not-tried"
    assert links_not_tried(list(links.values())) == ["the links of node2: it did not report"]


def test_a_machine_without_an_address_for_others_is_absent() -> None:
    links = surveyed([MadeUp(0), MadeUp(1, addresses=["127.0.0.1"]), MadeUp(2)])
    (found,) = judge_links(list(links.values()))
    assert (found.name, found.hosts) == ("host-absent", ("node2",))
