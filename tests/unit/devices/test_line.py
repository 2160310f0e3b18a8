"""The line of waiting requests: order of arrival, and the guard for requests that wait for a day."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from torchmuster.devices import tickets
from torchmuster.devices.claims import Claims
from torchmuster.devices.tickets import LONG_WAIT_S, WaitingRequest, devices_of_those_ahead

NOW_S = 1_800_000_000.0
ALL = [f"GPU-{index}" for index in range(8)]


def waiting(
    wanted: int, *, waited_s: float = 60.0, devices: Sequence[str] = tuple(ALL)
) -> WaitingRequest:
    return WaitingRequest(
        pid=1, wanted=wanted, devices=tuple(devices), since_unix_s=NOW_S - waited_s, user="eva"
    )


def kept(ahead: Sequence[WaitingRequest], free: Sequence[int]) -> list[int]:
    """Return the indices of the GPUs that the last in line cannot have because of those ahead."""
    uuids = [ALL[index] for index in free]
    devices = devices_of_those_ahead(ahead, uuids, now_unix_s=NOW_S)
    return sorted(ALL.index(uuid) for uuid in devices)


def test_requests_are_met_in_the_order_of_their_arrival() -> None:
    assert kept([waiting(2), waiting(1)], free=[5, 6, 7]) == [5, 6, 7]


def test_a_smaller_request_may_start_before_one_that_cannot_be_met() -> None:
    assert kept([waiting(4), waiting(1)], free=[5, 6, 7]) == [5]


def test_a_request_for_other_devices_holds_nobody_up() -> None:
    assert kept([waiting(1, devices=["GPU-0"])], free=[7]) == []


def test_after_24_hours_all_devices_that_a_request_could_use_are_kept_for_it() -> None:
    large = waiting(4, waited_s=LONG_WAIT_S)
    assert kept([large], free=[5, 6, 7]) == list(range(8))
    assert kept([replace(large, since_unix_s=NOW_S - LONG_WAIT_S + 1)], free=[5, 6, 7]) == []


def test_a_waiter_that_does_not_poll_is_passed_over() -> None:
    assert kept([replace(waiting(8), responds=False)], free=range(8)) == []


counts = st.integers(min_value=1, max_value=8)
ages = st.sampled_from([60.0, 2 * LONG_WAIT_S])


@given(
    st.lists(st.tuples(counts, ages, st.sets(st.sampled_from(ALL), min_size=1)), max_size=6),
    st.sets(st.sampled_from(ALL)),
)
def test_promises_never_overlap_and_nobody_starves(
    requests: list[tuple[int, float, set[str]]], free: set[str]
) -> None:
    line = [waiting(count, waited_s=age, devices=sorted(can)) for count, age, can in requests]
    for place, request in enumerate(line):
        before = devices_of_those_ahead(line[:place], free, now_unix_s=NOW_S)
        after = devices_of_those_ahead(line[: place + 1], free, now_unix_s=NOW_S)
        assert before.keys() <= after.keys()
        gained = after.keys() - before.keys()
        usable = (free - before.keys()) & set(request.devices)
        if len(usable) >= request.wanted:
            assert len(gained) == request.wanted
            assert gained <= usable
        elif request.since_unix_s == NOW_S - 60.0:
            assert not gained
        else:
            assert gained == set(request.devices) - before.keys()


def test_numbers_go_on_although_the_first_in_line_left(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        first = tickets.Ticket(claims.queue, 1, ALL)
        second = tickets.Ticket(claims.queue, 2, ALL[:2], "2 GPUs")
    first.release()
    first.release()
    with claims.gate():
        third = tickets.Ticket(claims.queue, 2, ALL)
    line = tickets.read_tickets(claims.queue)
    assert [waiting.number for waiting in line] == [2, 3]
    assert (line[0].wanted, line[0].devices, line[0].request) == (2, tuple(ALL[:2]), "2 GPUs")
    assert abs(line[0].since_unix_s - time.time()) < 600
    second.release()
    third.release()


@pytest.mark.parametrize("since", [0, -5, 1e300, float("nan")])
def test_who_forges_an_impossible_time_has_just_arrived(since: float, tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        ticket = tickets.Ticket(claims.queue, 4, ALL)
    content = {"pid": 1, "wanted": 4, "devices": ALL, "since_unix_s": since}
    (claims.queue / "00000001").write_text(json.dumps(content))
    (read,) = tickets.read_tickets(claims.queue)
    assert abs(read.since_unix_s - time.time()) < 600
    ticket.release()


@pytest.mark.parametrize("since", ['"garbage"', "true", "null"])
def test_a_ticket_with_a_malformed_time_does_not_count(since: str, tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        ticket = tickets.Ticket(claims.queue, 4, ALL)
    content = f'{{"pid": 1, "wanted": 4, "devices": ["GPU-0"], "since_unix_s": {since}}}'
    (claims.queue / "00000001").write_text(content)
    assert tickets.read_tickets(claims.queue) == []
    ticket.release()
