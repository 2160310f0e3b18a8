"""Who reaches whom: real sockets on loopback, and the choice among made-up results."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.network import firewall, listening, reach
from torchmuster.launch.network.interfaces import Interface

NONCE = "c0ffee" * 5
HERE = [Interface(name="lo", up=True, addresses=("127.0.0.1",))]

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def tried(*targets: tuple[str, int], timeout_s: float = GIVE_UP_S) -> list[protocol.ReachResult]:
    message = protocol.Reach(
        nonce=NONCE,
        targets=tuple(protocol.Target(address=address, port=port) for address, port in targets),
        timeout_s=timeout_s,
    )
    return list(asyncio.run(reach.try_all_calls(message, interfaces=HERE)).results)


async def answered_by(serve: Serve) -> protocol.ReachResult:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        target = protocol.Target(address="127.0.0.1", port=server.sockets[0].getsockname()[1])
        message = protocol.Reach(nonce=NONCE, targets=(target,), timeout_s=60.0)
        (result,) = (await reach.try_all_calls(message, interfaces=HERE)).results
        return result


def test_a_port_that_answers_with_the_nonce_is_reached() -> None:
    async def run() -> tuple[protocol.ReachResult, ...]:
        port = listening.open_port(0, "127.0.0.1", interfaces=HERE).value
        await port.answer(NONCE)
        target = protocol.Target(address="127.0.0.1", port=port.port)
        message = protocol.Reach(nonce=NONCE, targets=(target, target), timeout_s=60.0)
        try:
            return (await reach.try_all_calls(message, interfaces=HERE)).results
        finally:
            await port.close()

    for result in asyncio.run(run()):
        assert result.problem == ""
        assert result.local == protocol.Address(address="127.0.0.1", interface="lo")
        assert 0 < result.seconds < 60


def test_the_port_of_another_run_is_not_taken_for_ours() -> None:

    async def run() -> protocol.ReachResult:
        port = listening.open_port(0, "127.0.0.1", interfaces=HERE).value
        await port.answer("the nonce of another run")
        target = protocol.Target(address="127.0.0.1", port=port.port)
        message = protocol.Reach(nonce=NONCE, targets=(target,), timeout_s=60.0)
        try:
            return (await reach.try_all_calls(message, interfaces=HERE)).results[0]
        finally:
            await port.close()

    assert asyncio.run(run()).problem == "impostor"


@pytest.mark.parametrize(
    "words",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b"\n", NONCE.encode() + b"x", b"z" * 100_000],
)
def test_another_program_is_an_impostor(words: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    assert asyncio.run(answered_by(serve)).problem == "impostor"


def test_the_request_does_not_give_the_nonce_away() -> None:
    assert NONCE.encode() not in listening.request_line(NONCE)


def test_one_who_does_not_answer_is_a_timeout_and_holds_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = ("127.0.0.1", silent.getsockname()[1])
        results = tried(*[target] * 20, timeout_s=0.2)
    assert {result.problem for result in results} == {"timeout"}


def test_packets_that_are_dropped_are_a_timeout() -> None:
    # Linux drops what does not fit into the queue of a socket whose program takes nobody in.
    with contextlib.ExitStack() as calls:
        full = calls.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = calls.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        (result,) = tried(("127.0.0.1", full.getsockname()[1]), timeout_s=0.3)
    assert result.problem == "timeout"
    assert result.local is None


def failing_with(number: int) -> Callable[..., Coroutine[Any, Any, None]]:
    async def connect(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return connect


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ECONNREFUSED, "refused"),
        (errno.EHOSTUNREACH, "unreachable"),
        (errno.ENETUNREACH, "no-route"),
        (errno.ETIMEDOUT, "timeout"),
        (errno.EPERM, "unreachable"),
    ],
)
def test_what_the_system_says_of_an_address(
    monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    monkeypatch.setattr(asyncio, "open_connection", failing_with(number))
    (result,) = tried(("203.0.113.7", 29400))
    assert result.problem == problem
    assert result.local is None


def test_an_address_that_this_machine_has_too_leads_to_itself() -> None:
    with socket.socket() as sock:  # which does not listen, and keeps others from the port
        sock.bind(("127.0.0.1", 0))
        results = tried(("127.0.0.1", sock.getsockname()[1]))
    assert [result.problem for result in results] == ["impostor"]


# ---- the choice


ETH0 = protocol.Address(address="10.0.0.5", interface="eth0")
ETH1 = protocol.Address(address="192.168.7.5", interface="eth1")
DOCKER = protocol.Address(address="172.17.0.1", interface="docker0")


def heard(*addresses: protocol.Address) -> protocol.Listening:
    return protocol.Listening(port=29400, addresses=addresses, reason="")


def reached(**problems: str) -> protocol.Reached:
    """``reached(eth0="", eth1="timeout")``"""
    known = {one.interface: one.address for one in (ETH0, ETH1, DOCKER)}
    return protocol.Reached(
        results=tuple(
            protocol.ReachResult(
                target=protocol.Target(address=known[interface], port=29400),
                problem=problem,
                seconds=0.1,
                local=None if problem else protocol.Address(address="10.0.0.6", interface="ens3"),
            )
            for interface, problem in problems.items()
        )
    )


def refusal(
    addresses: Sequence[protocol.Address],
    by_node: dict[str, protocol.Reached],
    system: str = "linux",
) -> Impossible:
    with pytest.raises(Impossible) as caught:
        reach.choose_address("a", system, heard(*addresses), list(by_node.items()))
    return caught.value


def test_the_first_address_that_all_reach_is_chosen() -> None:
    by_node = [
        ("b", reached(eth0="timeout", eth1="", docker0="impostor")),
        ("c", reached(eth0="", eth1="", docker0="impostor")),
    ]
    decision = reach.choose_address("a", "linux", heard(ETH0, ETH1, DOCKER), by_node)
    assert decision.value == "192.168.7.5"
    assert decision.reason == "192.168.7.5 (eth1 of a): reached by b and c"


@pytest.mark.parametrize("problem", ["timeout", "refused", "unreachable"])
def test_a_machine_that_reaches_nothing_is_named_with_the_cause_and_the_command(
    problem: str,
) -> None:
    by_node = {
        "b": reached(eth0=problem, docker0="impostor"),
        "c": reached(eth0="", docker0="impostor"),
    }
    error = refusal([ETH0, DOCKER], by_node)
    assert error.what == "a is not reached by b on port 29400"
    assert f"10.0.0.5 (eth0 of a), b: {reach.meaning_of(problem, 5)}" in error.why
    assert firewall.open_command("linux", 29400) in error.fix


def test_machines_that_reach_different_addresses_have_none_in_common() -> None:
    by_node = {"b": reached(eth0="", eth1="no-route"), "c": reached(eth0="timeout", eth1="")}
    error = refusal([ETH0, ETH1], by_node)
    assert error.what == "no address of a is reached by all other hosts on port 29400"
    assert "launch.address" in error.fix


def test_a_machine_that_listens_only_for_itself_is_told_that_others_cannot_reach_it() -> None:
    loopback = protocol.Address(address="127.0.1.1", interface="lo")
    error = refusal([loopback], {"b": reached(eth0="refused")})
    assert error.what == "the other hosts cannot reach a at 127.0.1.1"
    assert "omit launch.address" in error.fix
