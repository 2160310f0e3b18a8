"""Healthy machines pass: nothing above a note, also beside other load. ``HEALTHY=100`` is the whole length."""

import os
from contextlib import ExitStack

import pytest

from hosts.checking import check
from hosts.conftest import why_hosts_are_impossible
from hosts.faults import injected
from hosts.lab import Lab, remove_abandoned
from hosts.machine_faults import Busy

pytestmark = [
    pytest.mark.stress,
    pytest.mark.alone,
    pytest.mark.hosts,
    pytest.mark.skipif(
        why_hosts_are_impossible() is not None, reason=str(why_hosts_are_impossible())
    ),
]
HEALTHY = int(os.environ.get("HEALTHY", "2"))


@pytest.fixture(scope="module", autouse=True)
def no_abandoned_labs() -> None:
    remove_abandoned()


@pytest.mark.timeout(300 + 300 * HEALTHY)
def test_healthy_machines_pass() -> None:
    alarms = []
    for number in range(HEALTHY):
        count, loaded = 2 + number % 3, number % 2 == 1
        with Lab(count) as lab, ExitStack() as made:
            if loaded:
                made.enter_context(injected(lab, Busy(host="node1")))
            found = check(lab)
        alarm = found.above_note()
        told = f"{count} hosts{', busy' if loaded else ''}: {found.seconds:.1f} s"
        print(told, [one["what"] for one in alarm], flush=True)
        if alarm or found.exit_code:
            alarms.append((told, alarm))
    assert alarms == []
