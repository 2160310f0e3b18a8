"""The order of the queue, reservations and expected starts: pure functions."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from device_strategies import gpu, node
from torchmuster.devices.queue import (
    LONG_WAIT_S,
    expected_starts,
    order_of_queue,
    plan_queue,
    promise_to,
)
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.tickets import QueuedJob, WaitingRequest

NOW = 1_800_000_000.0
HOUR = 3600.0


def waiting(
    name: str, user: str, gpus: int, *, waited_s: float = 0.0, **job: Any
) -> WaitingRequest:
    since = NOW - waited_s
    return WaitingRequest(
        ticket=name,
        pid=1,
        uid=1,
        user=user,
        request=DeviceRequest(count=gpus),
        job=QueuedJob(**{"since_unix_s": since, "ready_unix_s": since, **job}),
    )


def held(*parts: tuple[str, int, float | None]) -> dict[str, Claim]:
    """Claims on the first GPUs: user, number of GPUs, time until they end."""
    claims: dict[str, Claim] = {}
    for user, count, lasts_s in parts:
        for _ in range(count):
            claims[gpu(len(claims)).uuid] = Claim(
                pid=9,
                user=user,
                command="train",
                since_unix_s=NOW - HOUR,
                ends_unix_s=None if lasts_s is None else NOW + lasts_s,
            )
    return claims


def server(count: int = 8) -> Any:
    return node(*(gpu(number) for number in range(count)))


def names(order: Any) -> str:
    return " ".join(one.ticket for one in order)


def test_who_holds_fewest_goes_first_and_what_is_queued_counts() -> None:
    queue = [
        waiting("a1", "ann", 2, waited_s=50),
        waiting("a2", "ann", 2, waited_s=40),
        waiting("b1", "ben", 2, waited_s=30),
        waiting("b2", "ben", 2, waited_s=20),
        waiting("c1", "cem", 1, waited_s=10),
    ]
    order = order_of_queue(queue, held(("ann", 1, None)), now_unix_s=NOW)
    assert names(order) == "b1 c1 a1 b2 a2"
    wide = order_of_queue(queue, held(("ann", 1, None)), now_unix_s=NOW, shares={"ann": 8.0})
    assert names(wide) == "b1 c1 a1 a2 b2"


def test_one_user_alone_is_served_by_arrival_and_priority() -> None:
    queue = [waiting(f"a{n}", "ann", 1, waited_s=50 - n, priority=n == 2) for n in range(4)]
    assert names(order_of_queue(queue, {}, now_unix_s=NOW)) == "a2 a0 a1 a3"


@pytest.mark.parametrize("priority", [-5, 0, 5])
def test_priority_gives_no_advantage_over_others(priority: int) -> None:
    queue = [
        waiting("a1", "ann", 1, waited_s=30),
        waiting("b1", "ben", 1, waited_s=20),
        waiting("a2", "ann", 1, waited_s=10, priority=priority),
    ]
    places = [one.user for one in order_of_queue(queue, {}, now_unix_s=NOW)]
    assert places.index("ben") <= 1


def test_a_long_wait_goes_first_whoever_holds_what() -> None:
    queue = [
        waiting("new", "ben", 1),
        waiting("long", "ann", 8, waited_s=LONG_WAIT_S),
        waiting("longer", "ann", 4, waited_s=LONG_WAIT_S + 1, priority=-1),
    ]
    order = order_of_queue(queue, held(("ann", 8, None)), now_unix_s=NOW)
    assert names(order) == "longer long new"


def test_held_and_dependent_requests_get_nothing_and_block_nobody() -> None:
    queue = [
        waiting("held", "ann", 8, waited_s=99, held=True),
        waiting("after", "ann", 8, waited_s=98, after=("run-1",)),
        replace(waiting("stopped", "ann", 8, waited_s=97), responds=False),
        waiting("b", "ben", 8),
    ]
    plan = plan_queue(server(), queue, {}, now_unix_s=NOW)
    assert list(plan.grants) == ["b"]
    assert names(plan.order) == "b held after stopped"


def test_what_cannot_be_met_reserves_only_by_known_ends() -> None:
    queue = [waiting("big", "ann", 8, waited_s=60), waiting("small", "ben", 1)]
    unknown = plan_queue(server(), queue, held(("cem", 4, None)), now_unix_s=NOW)
    assert unknown.reservation is None
    assert list(unknown.grants) == ["small"]
    known = plan_queue(server(), queue, held(("cem", 4, HOUR)), now_unix_s=NOW)
    assert known.reservation is not None
    assert known.reservation.ticket == "big"
    assert known.reservation.at_unix_s == NOW + HOUR
    assert known.grants == {}


@pytest.mark.parametrize(("lasts_s", "starts"), [(HOUR, True), (HOUR + 1, False), (None, False)])
def test_a_request_that_ends_in_time_may_use_reserved_gpus(
    lasts_s: float | None, starts: bool
) -> None:
    queue = [waiting("big", "ann", 8, waited_s=60), waiting("small", "ben", 1, lasts_s=lasts_s)]
    plan = plan_queue(server(), queue, held(("cem", 4, HOUR)), now_unix_s=NOW)
    assert ("small" in plan.grants) is starts


def test_gpus_that_the_reservation_does_not_need_stay_usable() -> None:
    queue = [waiting("big", "ann", 5, waited_s=60), waiting("small", "ben", 3, waited_s=30)]
    queue.append(waiting("s2", "dan", 1))
    plan = plan_queue(server(), queue, held(("cem", 4, HOUR)), now_unix_s=NOW)
    # Five are free in an hour with one of the four free ones: three are left.
    assert list(plan.grants) == ["small"]


def test_after_a_long_wait_free_gpus_are_kept_although_the_end_is_unknown() -> None:
    queue = [waiting("big", "ann", 8, waited_s=LONG_WAIT_S), waiting("small", "ben", 1, lasts_s=60)]
    plan = plan_queue(server(), queue, held(("cem", 4, None)), now_unix_s=NOW)
    assert plan.grants == {}
    assert plan.reservation is not None
    assert len(plan.reservation.uuids) == 4
    assert plan.reservation.at_unix_s is None


def test_a_claim_far_beyond_its_limit_counts_as_unknown() -> None:
    queue = [waiting("big", "ann", 8, waited_s=60), waiting("small", "ben", 1)]
    plan = plan_queue(server(), queue, held(("cem", 4, -HOUR)), now_unix_s=NOW)
    assert list(plan.grants) == ["small"]


def test_a_request_that_can_never_be_met_reserves_nothing() -> None:
    queue = [waiting("absurd", "ann", 9, waited_s=LONG_WAIT_S), waiting("small", "ben", 8)]
    assert list(plan_queue(server(), queue, {}, now_unix_s=NOW).grants) == ["small"]


def test_expected_starts_follow_the_ends_of_claims_and_of_the_jobs_before() -> None:
    queue = [
        waiting("first", "ann", 8, waited_s=60, lasts_s=2 * HOUR),
        waiting("second", "ben", 8, waited_s=30),
        waiting("third", "cem", 8, waited_s=10),
    ]
    starts = expected_starts(server(), queue, held(("dan", 4, HOUR)), now_unix_s=NOW)
    assert starts == {"first": NOW + HOUR, "second": NOW + 3 * HOUR}


def simulated_day(seed: int) -> tuple[list[WaitingRequest], dict[str, float], float]:
    """Serve 200 random requests of four users by the rule; return them, their starts, and the longest job."""
    chance = random.Random(seed)
    longest_s = 6 * HOUR
    to_come: list[WaitingRequest] = []
    lengths: dict[str, float] = {}
    for number in range(200):
        name = f"{number:03d}"
        length_s = lengths[name] = chance.uniform(0.1, 1.0) * longest_s
        arrival = NOW + chance.uniform(0.0, 48.0) * HOUR
        to_come.append(
            replace(
                waiting(
                    name,
                    chance.choice(["ann", "ben", "cem", "dan"]),
                    chance.choice([1, 1, 1, 2, 2, 4, 8]),
                    since_unix_s=arrival,
                    ready_unix_s=arrival,
                    priority=chance.choice([0, 0, 5]),
                    lasts_s=chance.choice([length_s, longest_s, None]),
                ),
            )
        )
    events = sorted({one.job.ready_unix_s for one in to_come})
    events = sorted([*events, *(event + LONG_WAIT_S for event in events)])
    claims: dict[str, Claim] = {}
    ends: dict[str, float] = {}  # of devices
    starts: dict[str, float] = {}
    host = server()
    while len(starts) < len(to_come):
        now = min(*events, *ends.values(), math.inf)
        events = [event for event in events if event > now]
        for uuid in [uuid for uuid, end in ends.items() if end <= now]:
            del ends[uuid], claims[uuid]
        queue = [one for one in to_come if one.job.ready_unix_s <= now and one.ticket not in starts]
        plan = plan_queue(host, queue, claims, now_unix_s=now)
        for one in plan.order:
            for uuid in plan.grants.get(one.ticket, ()):
                assert uuid not in claims, "granted twice"
                claims[uuid] = promise_to(one, now)
                ends[uuid] = now + lengths[one.ticket]
                starts[one.ticket] = now
    return to_come, starts, longest_s


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_waits_longer_than_the_rule_allows(seed: int) -> None:
    requests, starts, longest_s = simulated_day(seed)
    older_start = 0.0
    waited_long = 0
    for one in sorted(requests, key=lambda one: one.arrival):
        long_from = one.job.ready_unix_s + LONG_WAIT_S
        # From then on it waits for older requests, and then for the jobs that run.
        assert starts[one.ticket] <= max(long_from, older_start) + longest_s
        older_start = max(older_start, starts[one.ticket])
        waited_long += starts[one.ticket] > long_from
    assert waited_long > 10, "the rule was not put to the test"
