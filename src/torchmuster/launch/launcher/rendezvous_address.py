"""Choose the rendezvous address: an address of the first host that all other hosts can reach."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.node_handle import NodeHandle
from torchmuster.launch.network import reach

_ANSWER_WITHIN_S = 20.0
_LISTENING_WITHIN_S = (
    60.0  # a lost host is noticed earlier, by its heartbeat; a loaded one answers late
)


@dataclass(frozen=True, kw_only=True)
class RendezvousAddress:
    """The chosen address, and each host's own address and interface towards it."""

    address: str
    port: int
    local: tuple[protocol.Address, ...]


class ReachedHosts:
    """The hosts that reached each other in an earlier attempt, and their own addresses.

    A host that reconnected with the same addresses counts as tested.
    """

    def __init__(self) -> None:
        self._local: dict[str, tuple[tuple[protocol.Address, ...], protocol.Address]] = {}

    def remember(self, nodes: Sequence[NodeHandle], local: Sequence[protocol.Address]) -> None:
        """Remember each host's address and interface towards the others."""
        for node, own in zip(nodes, local, strict=True):
            assert node.record is not None
            self._local[node.name] = (node.record.addresses, own)

    def forget(self) -> None:
        """Have the next attempt test all hosts again."""
        self._local.clear()

    def local_addresses(self, nodes: Sequence[NodeHandle]) -> tuple[protocol.Address, ...] | None:
        """Return the addresses of these hosts; None if one of them was not tested."""
        found = []
        for node in nodes:
            addresses, own = self._local.get(node.name, ((), None))
            if own is None or node.record is None or node.record.addresses != addresses:
                return None
            found.append(own)
        return tuple(found)


async def choose_rendezvous_address(
    spec: JobSpec,
    nodes: Sequence[NodeHandle],
    *,
    attempt: int,
    say: Callable[[str], None],
    spares: Sequence[NodeHandle] = (),
    tested: ReachedHosts | None = None,
) -> RendezvousAddress:
    """Choose the address, open its port, and have all hosts check that they reach each other.

    Hosts that are in ``tested`` are not tested again. ``spares`` take part in the test only.
    """
    nonce = os.urandom(16).hex()
    if tested is not None and (known := tested.local_addresses(nodes)) is not None:
        own = known[0].address
        listening = await _listen_rendezvous_address(nodes[0], nonce, spec.port, own)
        return RendezvousAddress(address=own, port=listening.port, local=known)
    ranked = len(nodes)
    nodes = [*nodes, *spares]
    head, *others = nodes
    if not others:
        listening = await _listen_rendezvous_address(head, nonce, spec.port, spec.address)
        only = listening.addresses[0]
        return RendezvousAddress(address=only.address, port=listening.port, local=(only,))
    assert head.record is not None
    limit_s, system = spec.limits.reach_s, head.record.system
    # First any port, because ranks use such ports; the rendezvous port last, because it stays open.
    talking = await _listen_rendezvous_address(head, nonce, 0, spec.address)
    reach.check_not_loopback(head.name, talking, spec.address, head.record.addresses)
    talked = await _reach_all(others, nonce, talking, limit_s)
    listening = await _listen_rendezvous_address(head, nonce, spec.port, spec.address)
    try:
        best = reach.choose_address(head.name, system, talking, talked, timeout_s=limit_s)
        narrowed = msgspec.structs.replace(
            listening, addresses=tuple(_with(listening.addresses, best.value))
        )
    except (
        Impossible
    ):  # perhaps only the rendezvous port is reachable; the check below distinguishes that
        best, narrowed = None, listening
    reached = await _reach_all(others, nonce, narrowed, limit_s)
    chosen = reach.choose_address(head.name, system, narrowed, reached, timeout_s=limit_s)
    ends = [reach.local_end(answer, chosen.value) for _, answer in reached]
    local = (*_with(listening.addresses, chosen.value), *filter(None, ends))
    places = [_rendezvous_address_place(node, end) for node, end in zip(nodes, local, strict=True)]
    target = protocol.Target(address=chosen.value, port=talking.port)
    calls = [
        reach.ReachCall(
            caller=place,
            called=places[0],
            port=talking.port,
            problem=reach.problem_at(answer, target),
        )
        for (_, answer), place in zip(talked, places[1:], strict=True)
    ]
    calls += await _call_each_other(nodes, places, nonce, limit_s)
    both_ways = any(node.has_gpus for node in nodes)
    note = reach.check_reachability(
        calls, both_ways=both_ways, port=listening.port, timeout_s=limit_s
    )
    if attempt == 0:
        say(f"rendezvous at {(best or chosen).reason}; {listening.reason}")
        if note:
            say(note)
    if tested is not None:
        tested.remember(nodes, local)
    return RendezvousAddress(address=chosen.value, port=listening.port, local=local[:ranked])


async def _listen_rendezvous_address(
    node: NodeHandle, nonce: str, port: int | None, address: str | None
) -> protocol.Listening:
    message = protocol.Listen(nonce=nonce, port=port, address=address)
    return await node.ask(message, protocol.Listening, within_s=_LISTENING_WITHIN_S)


async def _reach(
    node: NodeHandle, nonce: str, targets: Sequence[protocol.Target], limit_s: float
) -> protocol.Reached:
    message = protocol.Reach(nonce=nonce, targets=tuple(targets), timeout_s=limit_s)
    return await node.ask(message, protocol.Reached, within_s=limit_s + _ANSWER_WITHIN_S)


async def _reach_all(
    nodes: Sequence[NodeHandle], nonce: str, listening: protocol.Listening, limit_s: float
) -> reach.Answers:
    """Have hosts try all addresses of the first host."""
    targets = [
        protocol.Target(address=one.address, port=listening.port) for one in listening.addresses
    ]
    return await _answers(nodes, nonce, targets, limit_s)


async def _answers(
    nodes: Sequence[NodeHandle], nonce: str, targets: Sequence[protocol.Target], limit_s: float
) -> reach.Answers:
    found = await asyncio.gather(*(_reach(node, nonce, targets, limit_s) for node in nodes))
    return [(node.name, one) for node, one in zip(nodes, found, strict=True)]


async def _call_each_other(
    nodes: Sequence[NodeHandle], places: Sequence[reach.NodeAddress], nonce: str, limit_s: float
) -> list[reach.ReachCall]:
    """Have every host except the first open a free port, and some of the others connect to it."""
    opened = await asyncio.gather(
        *(
            _listen_rendezvous_address(node, nonce, 0, place.address)
            for node, place in zip(nodes[1:], places[1:], strict=True)
        )
    )
    targets = [
        protocol.Target(address=place.address, port=one.port)
        for place, one in zip(places[1:], opened, strict=True)
    ]

    async def call(caller: int) -> list[reach.ReachCall]:
        called = reach.called_by(caller, len(nodes))
        wanted = [targets[one - 1] for one in called]
        reached = await _reach(nodes[caller], nonce, wanted, limit_s)
        return [
            reach.ReachCall(
                caller=places[caller],
                called=places[one],
                port=target.port,
                problem=reach.problem_at(reached, target),
            )
            for one, target in zip(called, wanted, strict=True)
        ]

    found = await asyncio.gather(*(call(caller) for caller in range(len(nodes))))
    return [one for calls in found for one in calls]


def _with(addresses: Sequence[protocol.Address], wanted: str) -> list[protocol.Address]:
    return [one for one in addresses if one.address == wanted]


def _rendezvous_address_place(node: NodeHandle, end: protocol.Address) -> reach.NodeAddress:
    assert node.record is not None
    return reach.NodeAddress(name=node.name, system=node.record.system, address=end.address)
