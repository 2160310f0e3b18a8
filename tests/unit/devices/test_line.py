"""The line of waiting requests: order of arrival, and the guard for requests that wait for a day."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot, tickets
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Node
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.tickets import LONG_WAIT_S, WaitingRequest, devices_of_those_ahead

NOW_S = 1_800_000_000.0


@pytest.fixture
def node(machine: Callable[[Scenario], Path]) -> Node:
    """A host with eight idle GPUs."""
    machine(scenarios.eight_a100_idle())
    return snapshot.take_snapshot()


def waiting(number: int, request: DeviceRequest, *, waited_s: float = 60.0) -> WaitingRequest:
    return WaitingRequest(
        number=number, pid=number, user="eva", request=request, since_unix_s=NOW_S - waited_s
    )


def claimed(node: Node, *indices: int) -> dict[str, Claim]:
    claim = Claim(pid=1, user="ben", command="train.py", since_unix_s=NOW_S - 600)
    return {node.accelerators[index].uuid: claim for index in indices}


def kept(node: Node, ahead: Sequence[WaitingRequest], claims: Mapping[str, Claim]) -> list[int]:
    """Return the indices of the GPUs that the last in line cannot have because of those ahead."""
    devices = devices_of_those_ahead(node, ahead, claims, now_unix_s=NOW_S)
    return sorted(device.index for device in node.accelerators if device.uuid in devices)


def test_requests_are_met_in_the_order_of_their_arrival(node: Node) -> None:
    line = [waiting(1, DeviceRequest(count=2)), waiting(2, DeviceRequest(count=1))]
    assert kept(node, line, claimed(node, 0, 1, 2, 3, 4)) == [5, 6, 7]


def test_a_smaller_request_may_start_before_one_that_cannot_be_met(node: Node) -> None:
    line = [waiting(1, DeviceRequest(count=4)), waiting(2, DeviceRequest(count=1))]
    assert kept(node, line, claimed(node, 0, 1, 2, 3, 4)) == [5]


def test_after_24_hours_all_devices_that_a_request_could_use_are_kept_for_it(node: Node) -> None:
    claims = claimed(node, 0, 1, 2, 3, 4)
    large = waiting(1, DeviceRequest(count=4), waited_s=LONG_WAIT_S)
    assert kept(node, [large], claims) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert kept(node, [replace(large, since_unix_s=NOW_S - LONG_WAIT_S + 1)], claims) == []


def test_a_request_that_this_host_can_never_meet_keeps_nothing(node: Node) -> None:
    too_many = waiting(1, DeviceRequest(count=9), waited_s=2 * LONG_WAIT_S)
    no_such = waiting(2, DeviceRequest(ids=("GPU-none",)), waited_s=2 * LONG_WAIT_S)
    assert kept(node, [too_many, no_such], {}) == []


def test_a_waiter_that_does_not_poll_is_passed_over(node: Node) -> None:
    stopped = replace(waiting(1, DeviceRequest(count=8)), responds=False)
    assert kept(node, [stopped], {}) == []


counts = st.integers(min_value=1, max_value=9)
ages = st.sampled_from([60.0, 2 * LONG_WAIT_S])


def test_promises_never_overlap_and_take_no_claimed_device(node: Node) -> None:
    @given(
        st.lists(st.tuples(counts, ages), max_size=6),
        st.sets(st.integers(min_value=0, max_value=7)),
    )
    def check(requests: list[tuple[int, float]], held: set[int]) -> None:
        claims = claimed(node, *held)
        line = [
            waiting(number, DeviceRequest(count=count), waited_s=age)
            for number, (count, age) in enumerate(requests, start=1)
        ]
        free = 8 - len(held)
        for place, request in enumerate(line):
            before = devices_of_those_ahead(node, line[:place], claims, now_unix_s=NOW_S)
            after = devices_of_those_ahead(node, line[: place + 1], claims, now_unix_s=NOW_S)
            wanted = request.request.wanted
            left = free - len(before.keys() - claims.keys())
            gained = after.keys() - before.keys() - claims.keys()
            if wanted <= left:
                assert len(gained) == wanted
            elif request.since_unix_s == NOW_S - 60.0 or wanted > 8:
                assert not gained
            else:
                assert len(gained) == left

    check()


def test_numbers_go_on_although_the_first_in_line_left(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        first = tickets.Ticket(claims.queue, DeviceRequest(count=1), {}, run="/runs/first")
        second = tickets.Ticket(claims.queue, DeviceRequest(ids=(0, "GPU-1")), {"HOME": "/"})
    first.release()
    first.release()
    with claims.gate():
        third = tickets.Ticket(claims.queue, DeviceRequest(count=2), {})
    line = tickets.read_tickets(claims.queue)
    assert [waiting.number for waiting in line] == [2, 3]
    assert line[0].request == DeviceRequest(ids=(0, "GPU-1"))
    assert line[0].environment == {}
    assert abs(line[0].since_unix_s - time.time()) < 600
    second.release()
    third.release()
