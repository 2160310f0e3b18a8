"""Opening ports on all machines, and what that alone shows; the conversation with one machine."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchmuster.diagnose.links import measure
from torchmuster.diagnose.links.messages import (
    Call,
    Called,
    Interface,
    Result,
    Serve,
    Served,
    read,
    written,
)
from torchmuster.diagnose.links.model import NOT_TRIED
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import USUAL_PORT

_ANSWER_WITHIN_S = 20.0
# It is done even if the answer comes later; a machine that is gone must not keep anyone waiting.
_DONE_WITHIN_S = 2.0
_SERVE_FOR_S = 300.0


class Examiner(Protocol):
    """A machine that can be asked; see ``diagnose/conversation.py``."""

    name: str
    place: int
    record: protocol.NodeRecord

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        """Return the machine's answer."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is known of a machine: what it has opened, or what kept it from that."""

    examiner: Examiner
    served: Served | None = None
    findings: tuple[Finding, ...] = ()


async def serve_all(
    examiners: Sequence[Examiner], nonce: str, port: int | None, address: str | None
) -> list[Found]:
    """Have every machine open its ports; the first one the meeting port as well."""
    return list(
        await asyncio.gather(
            *(
                _serve(
                    one,
                    Serve(
                        nonce=nonce,
                        meeting=position == 0,
                        port=port,
                        address=address if position == 0 else None,
                        for_s=_SERVE_FOR_S,
                    ),
                )
                for position, one in enumerate(examiners)
            )
        )
    )


async def _serve(examiner: Examiner, asked: Serve) -> Found:
    try:
        told = await examiner.ask("serve", written(asked), within_s=_ANSWER_WITHIN_S)
        served = read(Served, told)
    except MusterError as error:
        return Found(examiner=examiner, findings=tuple(from_error(error)))
    down = _without_link(examiner.name, served)
    if down is not None:  # nobody can try it, and it can try nobody
        return Found(examiner=examiner, findings=(down,))
    return Found(
        examiner=examiner,
        served=served,
        findings=tuple(_own_findings(examiner.name, asked, served)),
    )


def _own_findings(name: str, asked: Serve, served: Served) -> Iterable[Finding]:
    trouble = served.meeting_trouble
    if trouble is not None:
        yield Finding(
            name="meeting-port-taken",
            status=Status.FAILURE,
            what=f"{name}: {trouble.what}",
            why=trouble.why,
            fix=trouble.fix,
        )
    elif asked.meeting and asked.port is None and served.meeting_port != USUAL_PORT:
        yield Finding(
            name="meeting-port-taken",
            status=Status.NOTE,
            what=f"{name}: port {USUAL_PORT} is taken; muster meets at {served.meeting_port} instead",
            why=f"{served.meeting_reason}. torchrun itself would wait there without a word",
            fix=f"see who has it, on {name}:\nss -ltnp 'sport = :{USUAL_PORT}'",
        )


def _without_link(name: str, served: Served) -> Finding | None:
    """Return what to say of a machine that others cannot reach because none of its interfaces works."""
    if not all(ipaddress.ip_address(one.address).is_loopback for one in served.addresses):
        return None
    idle = [one for one in served.interfaces if one.networks and not _is_loopback(one)]
    if not idle:
        return Finding(
            name="link-down",
            status=Status.FAILURE,
            what=f"{name} is not connected: it has no address but 127.0.0.1",
            why="no interface has an address at which others could reach it",
            fix=f"give it one, on {name}:\nip -br address",
        )
    first = idle[0]
    where = f"{first.name} ({first.networks[0]})"
    if first.up:
        return Finding(
            name="link-down",
            status=Status.FAILURE,
            what=f"{name} is not connected: {where} has no cable",
            why="the interface is up and sees nobody at the other end: the cable is out or broken, or "
            "the port of the switch is off",
            fix="put the cable in, or try another one and another port of the switch; "
            f"it is well when this says yes, on {name}:\n"
            f"sudo ethtool {first.name} | grep -i 'link detected'",
        )
    return Finding(
        name="link-down",
        status=Status.FAILURE,
        what=f"{name} is not connected: {where} is switched off",
        why="the interface has an address and is down",
        fix=f"switch it on, on {name}:\nsudo ip link set dev {first.name} up",
    )


def _is_loopback(interface: Interface) -> bool:
    return any(ipaddress.ip_interface(one).is_loopback for one in interface.networks)


async def keep_open(found: Sequence[Found], nonce: str) -> None:
    """Have the machines keep their ports open for another while."""
    again = written(Serve(nonce=nonce, for_s=_SERVE_FOR_S))
    await asyncio.gather(
        *(_tell(one.examiner, "serve", again) for one in found if one.served is not None)
    )


async def close(examiner: Examiner, nonce: str) -> None:
    """Have a machine close its ports; else it does so by itself after a while."""
    await _tell(examiner, "close", {"nonce": nonce})


async def _tell(examiner: Examiner, verb: str, argument: Any) -> None:
    with contextlib.suppress(MusterError):
        await examiner.ask(verb, argument, within_s=_DONE_WITHIN_S)


async def ask_to_call(examiner: Examiner, call: Call) -> list[Result]:
    """Return how a machine's calls went; if it does not answer, that none was tried."""
    within_s = call.timeout_s + _ANSWER_WITHIN_S
    if call.measure:
        within_s += (2 * call.timeout_s + measure.LIMIT_S) * len(call.targets)
    try:
        told = await examiner.ask("call", written(call), within_s=within_s)
        results = read(Called, told).results
    except MusterError:
        results = ()
    if len(results) != len(call.targets):
        return [Result(problem=NOT_TRIED, seconds=0.0) for _ in call.targets]
    return list(results)
