"""Simulated searches for bad machines and links in groups of up to 100,000.

    python tests/stress/check_scale.py SEEDS > check_rounds.jsonl

Each line is one kind of search: what it needed, and how often it found exactly what was bad.
"""

import asyncio
import json
import random
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simulated_group import SimulatedGroup
from torchmuster.diagnose.group_testing import LinkSearch, SuspectedFault, find_bad
from torchmuster.diagnose.rounds import Pair


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is looked for. With ``Links.NONE`` machines are bad, else links are."""

    links: LinkSearch
    faults: Collection[SuspectedFault] = tuple(SuspectedFault)
    # A slow link is looked for only where collectives use it.
    may_be: Sequence[SuspectedFault] = tuple(SuspectedFault)


KINDS = {
    "machines": Kind(links=LinkSearch.NONE),
    "links of collectives": Kind(links=LinkSearch.COLLECTIVES),
    "any link": Kind(
        links=LinkSearch.EVERY, may_be=(SuspectedFault.DEAD, SuspectedFault.CORRUPTING)
    ),
    "any dead link": Kind(
        links=LinkSearch.EVERY, faults=(SuspectedFault.DEAD,), may_be=(SuspectedFault.DEAD,)
    ),
}
# How the simulated groups differ from what the search assumes of them.
AS_ASSUMED = "as assumed"
WORLDS: dict[str, dict[str, Any]] = {
    AS_ASSUMED: {},
    "times vary by 10 %": {"noise": 0.1},
    "corruption shows in 5 tests of 10": {"seen_chance": 0.5},
}
BAD = (1, 2, 5, 10, 20)
# By the number of machines: how many are bad, and the share of the seeds that is tried.
SIZES: dict[int, tuple[Sequence[int], float]] = {
    100: (BAD, 1.0),
    1_000: (BAD, 0.2),
    10_000: (BAD, 0.02),
    100_000: ((1, 20), 0.01),
}
ODD_SIZE, ODD_BAD = 1_000, (0, 5)


def bad_links(
    count: int, number: int, fault: SuspectedFault, links: LinkSearch, chosen: random.Random
) -> dict[Pair, SuspectedFault]:
    found: dict[Pair, SuspectedFault] = {}
    while len(found) < number:
        one = chosen.randrange(count)
        if links is LinkSearch.EVERY:
            other = chosen.randrange(count)
        else:
            other = (one + 2 ** chosen.randrange((count - 1).bit_length())) % count
        if one != other:
            found[min(one, other), max(one, other)] = fault
    return found


def search(
    count: int, kind: str, fault: SuspectedFault, number: int, seed: int, world: str = AS_ASSUMED
) -> dict[str, Any]:
    """Search once."""
    wanted = KINDS[kind]
    chosen = random.Random(f"{count} {kind} {fault} {number} {seed}")
    nodes: dict[int, SuspectedFault] = {}
    between: dict[Pair, SuspectedFault] = {}
    if wanted.links is LinkSearch.NONE:
        nodes = dict.fromkeys(chosen.sample(range(count), number), fault)
    else:
        between = bad_links(count, number, fault, wanted.links, chosen)
    group = SimulatedGroup(
        bad_nodes=nodes, bad_links=between, seed=chosen.randrange(2**32), **WORLDS[world]
    )
    found = asyncio.run(find_bad(group, count, links=wanted.links, faults=wanted.faults))
    bad = set(nodes) | set(between)
    accused = set(found.bad_nodes) | set(found.bad_links)
    return {
        "rounds": found.rounds,
        "tests": found.tests,
        "seconds": group.seconds,
        "missed": len(bad - accused),
        "accused": len(accused - bad),
        "exact": found.bad_nodes == nodes and found.bad_links == between,
    }


def line(
    count: int, kind: str, fault: SuspectedFault, number: int, seeds: int, world: str = AS_ASSUMED
) -> dict[str, Any]:
    """Search with several seeds, and sum up."""
    runs = [search(count, kind, fault, number, seed, world) for seed in range(seeds)]
    return {
        "world": world,
        "count": count,
        "kind": kind,
        "fault": fault.value,
        "bad": number,
        "seeds": seeds,
        "rounds": statistics.mean(run["rounds"] for run in runs),
        "most_rounds": max(run["rounds"] for run in runs),
        "tests": statistics.mean(run["tests"] for run in runs),
        "seconds": round(statistics.mean(run["seconds"] for run in runs), 1),
        "exact": sum(run["exact"] for run in runs),
        "missed": sum(run["missed"] for run in runs),
        "accused": sum(run["accused"] for run in runs),
    }


def lines_at(
    count: int, numbers: Sequence[int], seeds: int, kinds: Collection[str] = tuple(KINDS)
) -> Iterator[dict[str, Any]]:
    """Yield a line for each kind of search in groups of this size, with so many bad ones."""
    for kind in kinds:
        for fault in KINDS[kind].may_be:
            for number in numbers:
                yield line(count, kind, fault, number, seeds)


def odd_lines(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each kind of search in a group that is not as the search assumes."""
    for world in list(WORLDS)[1:]:
        fault = SuspectedFault.SLOW if "noise" in WORLDS[world] else SuspectedFault.CORRUPTING
        for kind, wanted in KINDS.items():
            if fault in wanted.may_be:
                for number in ODD_BAD:
                    yield line(ODD_SIZE, kind, fault, number, seeds, world)


def lines(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield all lines; larger groups get fewer seeds, but at least one."""
    for count, (numbers, share) in SIZES.items():
        yield from lines_at(count, numbers, max(1, round(seeds * share)))
    yield from odd_lines(max(1, round(seeds * SIZES[ODD_SIZE][1])))


if __name__ == "__main__":
    for one in lines(int(sys.argv[1])):
        print(json.dumps(one), flush=True)
