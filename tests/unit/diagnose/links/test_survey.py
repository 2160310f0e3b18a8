"""The course of a survey, with machines that are made up: what is asked of them, and what is tried again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import (
    Call,
    Figures,
    Interface,
    Link,
    Problem,
    Result,
    Served,
)
from torchmuster.diagnose.links.survey import survey_links
from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Status
from torchmuster.launch import protocol
from torchmuster.launch.protocol import Target
from unit.diagnose.links.made_up import GOOD

# How a call goes: from one machine to an address and port of another.
Answer = Callable[["MadeUp", Target, Call], Result]


def well(caller: "MadeUp", target: Target, call: Call) -> Result:
    figures = GOOD if call.measure else None
    return Result(problem=Problem.NONE, seconds=0.001, figures=figures)


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
        self.calls: list[Call] = []
        self.log: list[str] = []
        self.within_s: dict[str, float] = {}
        self.served: dict[str, Any] = {}

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        self.log.append(verb)
        self.within_s[verb] = within_s
        await asyncio.sleep(0)
        if verb == "serve":
            return self.serve(argument["rendezvous"])
        if verb == "call":
            call = msgspec.convert(argument, Call)
            self.calls.append(call)
            results = tuple(self.answer(self, target, call) for target in call.targets)
            return msgspec.to_builtins(results)
        return None

    def serve(self, rendezvous: bool) -> Any:
        return msgspec.to_builtins(
            Served(
                port=40000 + self.place,
                addresses=tuple(
                    protocol.Address(address=one, interface=f"eth{number}")
                    for number, one in enumerate(self.addresses)
                ),
                interfaces=tuple(
                    Interface(
                        name=f"eth{number}",
                        up=True,
                        connected=True,
                        mtu_bytes=1500,
                        networks=(f"{one}/24",),
                    )
                    for number, one in enumerate(self.addresses)
                ),
                rendezvous_port=29400 if rendezvous else None,
                **self.served,
            )
        )


def surveyed(machines: Sequence[MadeUp], **options: Any) -> dict[tuple[int, int], Link]:
    return {link.places: link for link in asyncio.run(survey_links(machines, **options))}


def test_all_directions_are_tried_and_each_pair_is_measured_once() -> None:
    machines = [MadeUp(place) for place in range(4)]
    links = surveyed(machines)
    assert set(links) == {(one, other) for one in range(4) for other in range(4) if one != other}
    assert all(link.problem == "" for link in links.values())
    measured = [call for one in machines for call in one.calls if call.measure]
    assert len(measured) == 4
    ring = {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert {tuple(sorted(places)) for places, link in links.items() if link.figures} == ring
    assert all(one.log[0] == "serve" and one.log[-1] == "close" for one in machines)
    assert judge_links(list(links.values())) == []


def test_the_address_is_taken_that_the_others_reach() -> None:
    def second_network(caller: MadeUp, target: Target, call: Call) -> Result:
        if target.address.startswith("192.168."):
            return Result(problem=Problem.ABSENT, seconds=3.0)
        return well(caller, target, call)

    machines = [
        MadeUp(place, second_network, addresses=[f"192.168.0.{place}", f"10.0.0.{place}"])
        for place in range(3)
    ]
    links = surveyed(machines)
    assert {link.target.address for link in links.values()} == {"10.0.0.0", "10.0.0.1", "10.0.0.2"}
    assert links[0, 1].target.interface == "eth1"
    assert links[0, 1].target.network == "10.0.0.0/24"
    assert judge_links(list(links.values())) == []


def test_where_no_address_is_reached_the_one_with_a_firewall_is_meant() -> None:
    def blocked(caller: MadeUp, target: Target, call: Call) -> Result:
        far = target.address.startswith("192.168.")
        problem = Problem.ABSENT if far else Problem.REFUSED
        return Result(problem=problem)

    machines = [
        MadeUp(place, blocked, addresses=[f"192.168.0.{place}", f"10.0.0.{place}"])
        for place in range(2)
    ]
    links = surveyed(machines)
    assert links[0, 1].target.address == "10.0.0.1"
    assert links[0, 1].problem == "refused"


def test_silence_is_tried_again() -> None:
    silent: list[str] = []

    def once(caller: MadeUp, target: Target, call: Call) -> Result:
        if not call.measure and target.address not in silent:
            silent.append(target.address)
            return Result(problem=Problem.TIMEOUT, seconds=5.0)
        return well(caller, target, call)

    links = surveyed([MadeUp(0, once), MadeUp(1, once)])
    assert silent
    assert judge_links(list(links.values())) == []


def test_what_looks_bad_is_measured_again_and_the_best_try_counts() -> None:
    rates = iter([1e6, 1e6, 1e9])

    def better(caller: MadeUp, target: Target, call: Call) -> Result:
        if not call.measure:
            return well(caller, target, call)
        figures = msgspec.structs.replace(GOOD, bytes_per_s=next(rates))
        return Result(problem=Problem.NONE, figures=figures)

    links = surveyed([MadeUp(0, better), MadeUp(1, better)])
    assert next(rates, None) is None
    assert judge_links(list(links.values())) == []


def test_a_machine_that_cannot_serve_is_told_and_the_others_are_measured() -> None:
    class Broken(MadeUp):
        def serve(self, rendezvous: bool) -> Any:
            raise MusterError("node2: no free port", why="too many are")

    links = surveyed([MadeUp(0), Broken(1), MadeUp(2)])
    assert links[0, 1].problem == links[1, 2].problem == "not-tried"
    assert links[0, 2].figures == GOOD
    (found,) = judge_links(list(links.values()))
    assert found.what == "node2: no free port"


def test_a_machine_that_is_lost_in_the_middle_does_not_end_the_survey() -> None:
    class Lost(MadeUp):
        async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
            if verb != "serve":
                raise MachineLost("node2 lost its probe program")
            return await super().ask(verb, argument, within_s=within_s)

    links = surveyed([MadeUp(0), Lost(1), MadeUp(2)])
    assert links[0, 2].figures == GOOD
    assert links[0, 1].figures == GOOD
    assert links[1, 0].problem == "not-tried"
    (found,) = judge_links(list(links.values()))
    assert (found.name, found.status) == ("links-not-tried", Status.WARNING)
    assert found.what.startswith("node2 ")


def test_a_rendezvous_port_that_was_asked_for_and_is_taken_is_a_failure() -> None:
    head = MadeUp(0)
    what, why = "port 5000 is taken", "held by nginx (pid 7)"

    def taken(rendezvous: bool) -> Any:
        told = MadeUp.serve(head, False)
        return {**told, "rendezvous_trouble": {"name": "impossible", "what": what, "why": why}}

    head.serve = taken  # type: ignore[method-assign]
    links = surveyed([head, MadeUp(1)], port=5000)
    (found,) = judge_links(list(links.values()))
    assert (found.name, found.status) == ("rendezvous-port-taken", Status.FAILURE)
    assert (found.what, found.why) == (f"node1: {what}", why)
    assert links[1, 0].rendezvous_problem is None


def test_figures_of_hostile_types_are_not_taken() -> None:
    class Liar(MadeUp):
        async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
            if verb == "call":
                return [{"problem": 7}]
            return await super().ask(verb, argument, within_s=within_s)

    links = surveyed([MadeUp(0), Liar(1)])
    assert links[1, 0].problem == "not-tried"
    assert isinstance(links[0, 1].figures, Figures)
