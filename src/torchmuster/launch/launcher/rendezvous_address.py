"""Choose the rendezvous address: an address of the first host that all other hosts can reach.

The first host opens the rendezvous port, and every other host tries it at each of the first host's addresses. Whether all
hosts reach each other on every port is a question for ``muster check``, which measures the links.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.host import ConnectedHost

_ANSWER_WITHIN_S = 20.0
# A lost host is noticed earlier, by its heartbeat; a loaded one answers late.
_LISTENING_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RendezvousAddress:
    """The chosen address, each host's own address and interface towards it, and the reason for the choice."""

    address: str
    port: int
    local: tuple[protocol.Address, ...]
    reason: str = ""


async def choose_rendezvous_address(
    spec: JobSpec, hosts: Sequence[ConnectedHost], *, before: RendezvousAddress | None = None
) -> RendezvousAddress:
    """Open the port on the first host, and choose the address at which all others reach it.

    The address ``before``, of the previous attempt, is tried alone first: an address that drops packets takes the whole
    time limit to answer.
    """
    if before is not None and spec.address is None and len(hosts) > 1:
        try:
            return await _meet(spec, hosts, before.address)
        except Impossible:
            pass  # another host is the first one now, or a new one does not reach this address
    return await _meet(spec, hosts, spec.address)


async def _meet(
    spec: JobSpec, hosts: Sequence[ConnectedHost], address: str | None
) -> RendezvousAddress:
    first, *others = hosts
    nonce, limit_s = os.urandom(16).hex(), spec.limits.reach_s
    listening = await first.ask(
        protocol.Listen(nonce=nonce, port=spec.port, address=address),
        protocol.Listening,
        within_s=_LISTENING_WITHIN_S,
    )
    if not others:
        only = listening.addresses[0]
        return RendezvousAddress(address=only.address, port=listening.port, local=(only,))
    from torchmuster.launch.network import reach

    assert first.record is not None
    reach.check_not_loopback(first.name, listening, address, first.record.addresses)
    targets = [protocol.Target(address=a.address, port=listening.port) for a in listening.addresses]
    request = protocol.Reach(nonce=nonce, targets=tuple(targets), timeout_s=limit_s)
    replies = await asyncio.gather(
        *(
            host.ask(request, protocol.Reached, within_s=limit_s + _ANSWER_WITHIN_S)
            for host in others
        )
    )
    answers = [(host.name, reply) for host, reply in zip(others, replies, strict=True)]
    chosen = reach.choose_address(
        first.name, first.record.system, listening, answers, timeout_s=limit_s
    )
    local = [own for own in listening.addresses if own.address == chosen.value]
    for reply in replies:
        end = reach.local_end(reply, chosen.value)
        assert end is not None  # it reached the chosen address
        local.append(end)
    return RendezvousAddress(
        address=chosen.value,
        port=listening.port,
        local=tuple(local),
        reason=f"rendezvous at {chosen.reason}; {listening.reason}",
    )
