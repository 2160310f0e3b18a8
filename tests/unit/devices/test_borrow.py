"""Which borrowed GPUs are given back, and which are taken: pure functions, and claims of real files."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_strategies import gpu, node
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot
from torchmuster.devices.acquire import acquire_devices
from torchmuster.devices.borrow import (
    DeviceRange,
    devices_to_return,
    give_back,
    idle_devices,
    usable_count,
)
from torchmuster.devices.claims import Claims
from torchmuster.devices.processes import user_with_uid
from torchmuster.devices.queue import plan_queue
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.shares import Shares
from torchmuster.devices.tickets import QueuedJob, Ticket, WaitingRequest
from torchmuster.errors import NotNow

NOW = 1_800_000_000.0
EIGHT = node(*(gpu(number) for number in range(8)))


def uuids(*numbers: int) -> set[str]:
    return {gpu(number).uuid for number in numbers}


def waiting(user: str, gpus: int, *, waited_s: float = 1.0, **job: Any) -> WaitingRequest:
    since = NOW - waited_s
    return WaitingRequest(
        ticket=f"{user}-{gpus}-{waited_s}",
        pid=1,
        uid=1,
        user=user,
        request=DeviceRequest(count=gpus),
        job=QueuedJob(**{"since_unix_s": since, "ready_unix_s": since, **job}),
    )


def held(own: dict[int, str], borrowed: dict[int, str]) -> dict[str, Claim]:
    """Claims by the number of the GPU; a higher number was borrowed later."""
    return {
        gpu(number).uuid: Claim(
            pid=2,
            user=user,
            command="muster train",
            since_unix_s=NOW - 1000 + number,
            borrowed=number in borrowed,
        )
        for number, user in {**own, **borrowed}.items()
    }


ALL_BORROWED = held({0: "eva", 1: "eva"}, dict.fromkeys(range(2, 8), "eva"))


def returned(claims: dict[str, Claim], *requests: WaitingRequest, **more: Any) -> set[str]:
    return set(devices_to_return(EIGHT, requests, claims, now_unix_s=NOW, **more))


def test_no_more_than_needed_and_the_last_borrowed_first() -> None:
    assert returned(ALL_BORROWED) == set()
    assert returned(ALL_BORROWED, waiting("ben", 2)) == uuids(6, 7)
    assert returned(ALL_BORROWED, waiting("ben", 2), waiting("cem", 3)) == uuids(3, 4, 5, 6, 7)
    assert returned(ALL_BORROWED, waiting("eva", 1)) == uuids(7)  # another job of the same user


def test_a_request_that_borrowed_gpus_cannot_meet_gets_none() -> None:
    assert returned(ALL_BORROWED, waiting("ben", 7)) == set()
    # One of both can be met.
    assert len(returned(ALL_BORROWED, waiting("ben", 7, waited_s=9), waiting("cem", 2))) == 2


def test_free_gpus_come_first() -> None:
    some = held({0: "eva"}, {1: "eva", 2: "eva"})
    assert returned(some, waiting("ben", 5)) == set()
    assert returned(some, waiting("ben", 6)) == uuids(2)


def test_held_requests_do_not_get_gpus() -> None:
    assert returned(ALL_BORROWED, waiting("ben", 1, held=True)) == set()
    assert returned(ALL_BORROWED, waiting("ben", 1, after=("run-1",))) == set()


def test_a_request_beyond_its_share_gets_none() -> None:
    shares = Shares(users={"ben": 2}, default=None)
    claims = held({0: "eva", 1: "ben"}, dict.fromkeys(range(2, 8), "eva"))
    assert returned(claims, waiting("ben", 2), shares=shares) == set()
    assert returned(claims, waiting("ben", 1), shares=shares) == uuids(7)
    assert returned(claims, waiting("cem", 2), shares=shares) == uuids(6, 7)


def test_gpus_that_are_of_no_use_alone_are_given_back_as_well() -> None:
    own = [gpu(number).uuid for number in range(8)]
    decision = give_back(
        EIGHT, [waiting("ben", 1)], ALL_BORROWED, own=own, counts=(2, 4, 8), now_unix_s=NOW
    )
    assert set(decision.value) == uuids(4, 5, 6, 7)
    assert "ben" in decision.reason
    assert "1 GPU" in decision.reason


def test_a_borrower_gives_back_only_its_own() -> None:
    claims = held(
        {0: "eva", 1: "cem"}, {2: "eva", 3: "eva", 4: "cem", 5: "cem", 6: "cem", 7: "eva"}
    )
    every = {}
    for user in ("eva", "cem"):
        own = [uuid for uuid, claim in claims.items() if claim.user == user]
        every[user] = give_back(
            EIGHT, [waiting("ben", 3)], claims, own=own, counts=range(1, 9), now_unix_s=NOW
        ).value
    assert set(every["eva"]) == uuids(7)
    assert set(every["cem"]) == uuids(5, 6)


def test_idle_gpus_that_a_request_gets_are_not_borrowed() -> None:
    claims = held({0: "eva"}, {})
    free = idle_devices(EIGHT, [waiting("ben", 5)], claims, claims, environment={}, now_unix_s=NOW)
    assert len(free) == 2
    none = idle_devices(EIGHT, [waiting("ben", 7)], claims, claims, environment={}, now_unix_s=NOW)
    assert none == ()


@pytest.mark.parametrize(
    ("counts", "available", "used"), [((2, 4, 8), 7, 4), ((2, 4, 8), 1, 2), ((1, 2, 3), 9, 3)]
)
def test_as_many_as_the_run_can_use(counts: tuple[int, ...], available: int, used: int) -> None:
    assert usable_count(counts, available) == used


def test_free_gpus_are_kept_for_a_request_that_gets_borrowed_ones() -> None:
    claims = held({0: "eva"}, {1: "eva", 2: "eva"})
    large, small = waiting("ben", 7, waited_s=9), waiting("cem", 1)
    plan = plan_queue(EIGHT, [large, small], claims, now_unix_s=NOW)
    assert plan.grants == {}
    assert plan.reservation is not None
    assert returned(claims, large, small) == uuids(1, 2)
    unmet = waiting("ben", 8, waited_s=9)
    assert plan_queue(EIGHT, [unmet, small], claims, now_unix_s=NOW).grants.keys() == {small.ticket}


@given(
    owners=st.lists(st.sampled_from(["", "own", "eva", "cem"]), min_size=8, max_size=8),
    wanted=st.lists(
        st.tuples(st.sampled_from(["ben", "dan", "fay"]), st.integers(1, 8)), max_size=4
    ),
)
def test_what_is_given_back_meets_requests_and_nothing_is_given_for_nothing(
    owners: list[str], wanted: list[tuple[str, int]]
) -> None:
    claims = held(
        {number: "max" for number, owner in enumerate(owners) if owner == "own"},
        {number: owner for number, owner in enumerate(owners) if owner in ("eva", "cem")},
    )
    requests = [
        waiting(user, gpus, waited_s=50.0 - place) for place, (user, gpus) in enumerate(wanted)
    ]
    before = plan_queue(EIGHT, requests, claims, now_unix_s=NOW).grants
    asked = devices_to_return(EIGHT, requests, claims, now_unix_s=NOW)
    left = {uuid: claim for uuid, claim in claims.items() if uuid not in asked}
    after = plan_queue(EIGHT, requests, left, now_unix_s=NOW).grants
    assert all(claims[uuid].borrowed for uuid in asked)
    granted = {uuid for uuids in after.values() for uuid in uuids}
    assert asked.keys() <= granted
    assert bool(after.keys() - before.keys()) == bool(asked)
    # All that could be met if everything borrowed were free.
    own = {uuid: claim for uuid, claim in claims.items() if not claim.borrowed}
    assert after.keys() == plan_queue(EIGHT, requests, own, now_unix_s=NOW).grants.keys()
    # Nothing is left to give back, so borrowers and requesters agree.
    assert devices_to_return(EIGHT, requests, left, now_unix_s=NOW) == {}


# ---- with claims


@pytest.fixture
def claims(machine: Callable[[Scenario], Path], own_machine: Path) -> Claims:
    machine(scenarios.eight_a100_idle())
    return Claims(own_machine / "claims")


def acquired(claims: Claims, count: int) -> Any:
    return acquire_devices(
        claims, snapshot.take_snapshot, DeviceRequest(count=count), environment={}
    )


def range_of(
    claims: Claims, first: Any, most: int, *, borrowed: bool = True, **more: Any
) -> DeviceRange:
    return DeviceRange(
        claims,
        first.decision.value,
        counts=more.get("counts", range(len(first.decision.value), most + 1)),
        token="0123",
        command="muster train",
        environment=more.get("environment", {}),
        borrowed=borrowed,
    )


def table(claims: Claims) -> dict[str, Claim]:
    return claims.glance(one.uuid for one in snapshot.take_snapshot().accelerators).claimed


def test_borrowed_gpus_are_claimed_marked_and_given_back(claims: Claims) -> None:
    with acquired(claims, 2) as first, acquired(claims, 1):
        devices = range_of(claims, first, 6)
        assert len(devices.extend(snapshot.take_snapshot).value) == 4
        assert devices.has_all
        assert devices.extend(snapshot.take_snapshot).value == ()
        assert sum(claim.borrowed for claim in table(claims).values()) == 4
        assert len(table(claims)) == 7
        assert devices.find_returns(snapshot.take_snapshot).value == ()
        ticket = Ticket(claims.queue, DeviceRequest(count=3), {})
        asked = devices.find_returns(snapshot.take_snapshot)
        assert len(asked.value) == 2  # with the free one
        assert set(asked.value) <= set(devices.extra)
        devices.release(asked.value)
        assert len(devices.devices) == 4
        # What the request gets is not borrowed again.
        assert devices.extend(snapshot.take_snapshot).value == ()
        ticket.give_back()
        assert len(devices.extend(snapshot.take_snapshot).value) == 2
        devices.release()
        devices.release()
        assert len(table(claims)) == 3


def test_more_are_borrowed_only_after_they_were_idle(claims: Claims) -> None:
    with acquired(claims, 2) as first:
        devices = range_of(claims, first, 4)
        assert devices.extend(snapshot.take_snapshot, idle_for_s=1000.0).value == ()
        assert devices.extend(snapshot.take_snapshot, idle_for_s=0.0).value
        devices.release()


def test_a_range_without_borrowing_keeps_its_gpus(claims: Claims) -> None:
    with acquired(claims, 2) as first:
        devices = range_of(claims, first, 8, borrowed=False, counts=(2, 4, 8))
        assert len(devices.extend(snapshot.take_snapshot).value) == 6
        assert not any(claim.borrowed for claim in table(claims).values())
        ticket = Ticket(claims.queue, DeviceRequest(count=1), {})
        assert devices.find_returns(snapshot.take_snapshot).value == ()
        ticket.give_back()
        devices.release()


def test_a_request_waits_for_borrowed_gpus_even_without_a_wait(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquired(claims, 2) as first:
        devices = range_of(claims, first, 8)
        devices.extend(snapshot.take_snapshot)
        told = []

        def look() -> Any:
            told.append(devices.find_returns(snapshot.take_snapshot))
            devices.release(told[-1].value)
            return snapshot.take_snapshot()

        with acquire_devices(claims, look, DeviceRequest(count=3), environment={}) as got:
            assert len(got.decision.value) == 3
            assert {one.uuid for one in got.decision.value} == {one.uuid for one in told[-1].value}
        devices.release()


def test_what_cannot_be_given_back_is_refused_at_once(claims: Claims) -> None:
    with acquired(claims, 2) as first:
        devices = range_of(claims, first, 8)
        devices.extend(snapshot.take_snapshot)
        with pytest.raises(NotNow):
            acquired(claims, 7)
        devices.release()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to be several users"
)
def test_real_users_get_borrowed_gpus_within_their_share(claims: Claims, own_machine: Path) -> None:
    for parent in (own_machine, *own_machine.parents):
        if parent.name.startswith(("pytest-", "popen-", "test_")):
            parent.chmod(parent.stat().st_mode | 0o011)  # pytest's folders are root's alone
    environment = {"TORCHMUSTER_CLAIMS_DIR": str(own_machine / "claims")}
    names = {uid: user_with_uid(uid) for uid in (65534, 65533)}
    with acquired(claims, 2) as first:
        (own_machine / "claims" / "shares.yaml").write_text(
            f"default: 0\nusers: {{{names[65534]}: 2, '{names[65533]}': 1, root: 2}}\n"
        )
        devices = range_of(claims, first, 8, environment=environment)
        assert len(devices.extend(snapshot.take_snapshot).value) == 6
        asking = [request_as(65533, claims, 2), request_as(65534, claims, 2)]
        try:
            asked = devices.find_returns(snapshot.take_snapshot)
        finally:
            for child in asking:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert len(asked.value) == 2  # one of the two requests is beyond its share
        assert asked.reason.startswith(f"{names[65534]} requested 2 GPUs")
        assert devices.find_returns(snapshot.take_snapshot).value == ()
        devices.release()


def request_as(uid: int, claims: Claims, count: int) -> int:
    """Wait for GPUs as another user, in a fork, until it is killed; return its process id."""
    begun, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            Ticket(claims.queue, DeviceRequest(count=count), {})
            os.write(says, b"1")
            signal.pause()
        finally:
            os._exit(0)
    os.close(says)
    with os.fdopen(begun, "rb") as stream:
        assert stream.read(1) == b"1"
    return child
