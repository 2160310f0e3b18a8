"""Finding bad machines and links: exactly with tests that never err, and seldom wrong with those that do."""

import asyncio
import math
import random
from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated_group import Clock, SimulatedGroup
from torchmuster.diagnose.group_testing import (
    Assumptions,
    Evidence,
    GroupDiagnosis,
    LinkSearch,
    ProbeGroup,
    ProbeOutcome,
    ProbeResult,
    Scales,
    SuspectedFault,
    find_bad,
    halvings,
)
from torchmuster.diagnose.rounds import Pair, collective_rounds, disjoint

PERFECT = Assumptions(noise=0.0, seen_chance=1.0, chance_failure=1e-9)
faults = st.sampled_from(SuspectedFault)


class Watched(SimulatedGroup):
    """A group that checks what it is asked: nobody is to be in two meetings of a round."""

    async def test(
        self, meetings: Sequence[ProbeGroup], *, without: frozenset[Pair]
    ) -> Sequence[ProbeOutcome]:
        busy = [one for meeting in meetings for one in chain(*meeting)]
        assert busy, "a round without a meeting"
        assert len(busy) == len(set(busy)), "somebody is in two meetings of a round"
        return await super().test(meetings, without=without)


def perfect(
    count: int,
    *,
    nodes: dict[int, SuspectedFault],
    bad_links: dict[Pair, SuspectedFault],
    links: LinkSearch,
) -> GroupDiagnosis:
    group = Watched(
        bad_nodes=nodes, bad_links=bad_links, noise=0.0, seen_chance=1.0, chance_failure=0.0
    )
    return asyncio.run(find_bad(group, count, assumptions=PERFECT, links=links))


@st.composite
def groups_with_bad_nodes(draw: st.DrawFn) -> tuple[int, dict[int, SuspectedFault]]:
    count = draw(st.integers(4, 80))
    most = count // 2 - 1
    return count, draw(st.dictionaries(st.integers(0, count - 1), faults, max_size=most))


@st.composite
def groups_with_bad_links(draw: st.DrawFn) -> tuple[int, dict[Pair, SuspectedFault]]:
    """No machine has two bad links, and most have none."""
    count = draw(st.integers(10, 80))
    order = draw(st.permutations(range(count)))
    number = draw(st.integers(0, count // 5))
    pairs = [tuple(sorted(order[2 * place : 2 * place + 2])) for place in range(number)]
    return count, {(one, other): draw(faults) for one, other in pairs}


@settings(deadline=None, max_examples=100)
@given(groups_with_bad_nodes())
def test_every_bad_machine_is_found_and_no_good_one_accused(
    group: tuple[int, dict[int, SuspectedFault]],
) -> None:
    count, nodes = group
    found = perfect(count, nodes=nodes, bad_links={}, links=LinkSearch.COLLECTIVES)
    assert (found.bad_nodes, found.bad_links, found.undecided) == (nodes, {}, ())


@settings(deadline=None, max_examples=100)
@given(groups_with_bad_links())
def test_every_bad_link_of_collectives_is_found_and_no_good_one_accused(
    group: tuple[int, dict[Pair, SuspectedFault]],
) -> None:
    count, bad_links = group
    used = set(chain(*collective_rounds(count)))
    found = perfect(count, nodes={}, bad_links=bad_links, links=LinkSearch.COLLECTIVES)
    assert found.bad_nodes == {}
    assert found.bad_links.items() <= bad_links.items()
    assert used & bad_links.keys() <= found.bad_links.keys()


@settings(deadline=None, max_examples=100)
@given(groups_with_bad_links())
def test_every_dead_or_corrupting_link_is_found_wherever_it_is(
    group: tuple[int, dict[Pair, SuspectedFault]],
) -> None:
    count, bad_links = group
    found = perfect(count, nodes={}, bad_links=bad_links, links=LinkSearch.EVERY)
    must = {link for link, fault in bad_links.items() if fault is not SuspectedFault.SLOW}
    assert found.bad_nodes == {}
    assert found.bad_links.items() <= bad_links.items()
    assert must <= found.bad_links.keys()


def test_a_machine_with_one_bad_link_is_not_taken_for_bad() -> None:
    for other in range(1, 12):
        found = perfect(
            12, nodes={}, bad_links={(0, other): SuspectedFault.DEAD}, links=LinkSearch.EVERY
        )
        assert (found.bad_nodes, found.bad_links) == ({}, {(0, other): SuspectedFault.DEAD})


def test_a_machine_with_a_bad_partner_and_a_bad_link_is_not_taken_for_bad() -> None:
    for other in range(2, 12):
        links = {(0, other): SuspectedFault.DEAD}
        found = perfect(12, nodes={1: SuspectedFault.DEAD}, bad_links=links, links=LinkSearch.EVERY)
        assert (found.bad_nodes, found.bad_links) == ({1: SuspectedFault.DEAD}, links)


def test_where_nobody_is_proven_good_nobody_is_accused() -> None:
    nodes = dict.fromkeys(range(0, 12, 2), SuspectedFault.DEAD)
    found = perfect(12, nodes=nodes, bad_links={}, links=LinkSearch.EVERY)
    assert (found.bad_nodes, found.undecided) == ({}, tuple(range(12)))


@pytest.mark.parametrize("count", [100, 1000])
def test_dead_machines_are_found_in_three_rounds(count: int) -> None:
    healthy = perfect(count, nodes={}, bad_links={}, links=LinkSearch.NONE)
    nodes = dict.fromkeys(range(3, 60, 3), SuspectedFault.DEAD)
    found = perfect(count, nodes=nodes, bad_links={}, links=LinkSearch.NONE)
    assert found.bad_nodes == nodes
    assert healthy.rounds == 2  # one for the dead, one for slow and corrupting
    # Three for the dead: in pairs, then with one witness, then with another. Then one for the others,
    # and one more for him who is left over, since 19 of an even number are gone.
    assert found.rounds == 5


def test_who_looks_for_dead_ones_alone_needs_few_rounds_and_finds_no_others() -> None:
    bad_links = {
        (5, 77): SuspectedFault.DEAD,
        (8, 9): SuspectedFault.DEAD,
        (20, 51): SuspectedFault.CORRUPTING,
    }
    group = Watched(
        bad_nodes={3: SuspectedFault.DEAD, 40: SuspectedFault.SLOW}, bad_links=bad_links
    )
    found = asyncio.run(find_bad(group, 100, links=LinkSearch.EVERY, faults=[SuspectedFault.DEAD]))
    assert found.bad_nodes == {3: SuspectedFault.DEAD}
    assert found.bad_links == {(5, 77): SuspectedFault.DEAD, (8, 9): SuspectedFault.DEAD}
    # Machines, everybody with everybody, the proof, and once more that nothing is left.
    assert found.rounds <= 10 + 2 * 7
    assert found.confidence == pytest.approx(0.96)


def test_blamed_links_are_proven_without_narrowing_down() -> None:
    class Silent(Watched):
        """Does not say who got no answer."""

        async def test(
            self, meetings: Sequence[ProbeGroup], *, without: frozenset[Pair]
        ) -> Sequence[ProbeOutcome]:
            told = await super().test(meetings, without=without)
            return [outcome._replace(blamed=frozenset()) for outcome in told]

    rounds = []
    for kind in (Watched, Silent):
        group = kind(bad_links={(5, 77): SuspectedFault.DEAD})
        found = asyncio.run(
            find_bad(group, 100, links=LinkSearch.EVERY, faults=[SuspectedFault.DEAD])
        )
        assert (found.bad_nodes, found.bad_links) == ({}, {(5, 77): SuspectedFault.DEAD})
        rounds.append(found.rounds)
    assert rounds[0] < rounds[1]


def test_with_more_bad_links_than_it_is_meant_for_a_search_ends_early() -> None:
    star = {(0, other): SuspectedFault.DEAD for other in range(30, 90)}
    group = Watched(bad_links=star)
    found = asyncio.run(find_bad(group, 100, links=LinkSearch.EVERY, faults=[SuspectedFault.DEAD]))
    assert found.bad_nodes == {}
    assert found.bad_links.items() <= star.items()
    assert 20 < len(found.bad_links) <= 40


def test_noise_is_seldom_taken_for_a_fault_and_a_fault_seldom_for_noise() -> None:
    missed = accused = 0
    for seed in range(60):
        chosen = random.Random(seed)
        nodes = {one: chosen.choice(list(SuspectedFault)) for one in chosen.sample(range(200), 6)}
        group = Watched(bad_nodes=nodes, seed=seed)
        found = asyncio.run(find_bad(group, 200, links=LinkSearch.NONE))
        missed += len(nodes.keys() - found.bad_nodes.keys())
        accused += len(found.bad_nodes.keys() - nodes.keys()) + len(found.bad_links)
    assert missed <= 1
    assert accused <= 1


def test_a_healthy_but_noisy_group_is_left_alone() -> None:
    for seed in range(10):
        found = asyncio.run(find_bad(Watched(seed=seed), 64, links=LinkSearch.EVERY))
        assert (found.bad_nodes, found.bad_links, found.undecided) == ({}, {}, ())


def test_confidence_falls_with_what_is_looked_at() -> None:
    said = [perfect(16, nodes={}, bad_links={}, links=links).confidence for links in LinkSearch]
    assert said == [pytest.approx(0.96), pytest.approx(0.94), pytest.approx(0.92)]


@given(st.integers(2, 200))
def test_halving_lets_every_two_meet_exactly_once(count: int) -> None:
    rounds = list(halvings(range(count)))
    met = [
        (min(one, other), max(one, other))
        for meetings in rounds
        for callers, called in meetings
        for one in callers
        for other in called
    ]
    assert sorted(met) == list(combinations(range(count), 2))
    assert len(rounds) == math.ceil(math.log2(count))


def test_a_good_pair_is_cleared_and_a_slow_one_is_not() -> None:
    scales = Scales([SuspectedFault.SLOW], Assumptions())
    good, slow = Evidence(scales), Evidence(scales)
    for _ in range(2):
        good.add(ProbeOutcome(ratio=1.0))
        slow.add(ProbeOutcome(ratio=1.25))
    assert good.cleared
    assert not slow.cleared
    assert slow.nats > Assumptions().nats_to_accuse(1000)
    assert slow.likeliest is SuspectedFault.SLOW


def test_one_wrong_value_is_proof_and_one_missing_answer_is_not() -> None:
    scales = Scales(list(SuspectedFault), Assumptions())
    wrong, silent = Evidence(scales), Evidence(scales)
    wrong.add(ProbeOutcome(seen=ProbeResult.WRONG))
    silent.add(ProbeOutcome(seen=ProbeResult.FAILED))
    assert wrong.nats > Assumptions().nats_to_accuse(10**9)
    assert wrong.likeliest is SuspectedFault.CORRUPTING
    assert silent.nats < Assumptions().nats_to_accuse(1000)
    silent.add(ProbeOutcome(seen=ProbeResult.FAILED))
    assert silent.nats > Assumptions().nats_to_accuse(1000)


def test_a_round_takes_as_long_as_its_slowest_meeting() -> None:
    clock = Clock(telling_s=0.001, pair_s=0.5, call_s=0.01, deadline_s=5)
    assert clock.round_s(1, told=100, failed=False) == pytest.approx(0.6)
    assert clock.round_s(200, told=400, failed=False) == pytest.approx(2.4)
    assert clock.round_s(200, told=400, failed=True) == pytest.approx(5.4)


def test_groups_that_share_a_machine_are_put_in_different_rounds() -> None:
    pairs = [(0, 1), (1, 2), (3, 4), (0, 4)]
    assert disjoint(pairs, members=tuple) == [[(0, 1), (3, 4)], [(1, 2), (0, 4)]]
