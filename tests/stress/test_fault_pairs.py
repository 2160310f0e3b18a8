"""Two faults at once: both are named. ``PAIRS=60`` is the whole length."""

import os

import pytest

from hosts.catalogue import Catalogued
from hosts.checking import Found, check, names
from hosts.conftest import why_hosts_are_impossible
from hosts.faults import injected
from hosts.lab import Lab, remove_abandoned
from hosts.pairs import HOSTS, random_pairs

pytestmark = [
    pytest.mark.stress,
    pytest.mark.alone,
    pytest.mark.hosts,
    pytest.mark.skipif(
        why_hosts_are_impossible() is not None, reason=str(why_hosts_are_impossible())
    ),
]
PAIRS = int(os.environ.get("PAIRS", "2"))
SEED = int(os.environ.get("PAIRS_SEED", "1"))


@pytest.fixture(scope="module", autouse=True)
def no_abandoned_labs() -> None:
    remove_abandoned()


@pytest.mark.timeout(300 + 300 * PAIRS)
def test_both_are_named() -> None:
    missed = []
    for first, second in random_pairs(PAIRS, SEED):
        with Lab(HOSTS) as lab, injected(lab, *first.faults, *second.faults):
            ranks = first.ranks or second.ranks
            found = check(lab, *([] if ranks else ["--quick"]), *first.flags, *second.flags)
        unnamed = [one.name for one in (first, second) if not _is_named(one, found)]
        print(f"{found.seconds:5.1f} s  {first.name} + {second.name}: missed {unnamed}", flush=True)
        if unnamed:
            missed.append((first.name, second.name, unnamed, found.said))
    assert len(missed) <= PAIRS * 3 // 60, missed


def _is_named(fault: Catalogued, found: Found) -> bool:
    return any(names(one, fault.says) for one in found.named(fault.finding))
