import os
import random
from pathlib import Path

import pytest

from hosts.conftest import why_hosts_are_impossible
from hosts.lab import Lab, remove_abandoned
from hosts.restarting import restart_by_kills
from stress.fifty_kills import events, happen

pytestmark = [
    pytest.mark.stress,
    pytest.mark.hosts,
    pytest.mark.skipif(
        why_hosts_are_impossible() is not None, reason=str(why_hosts_are_impossible())
    ),
]
# In CI a few of each; at full length: KILLS=50 RESTARTS=30
_KILLS = int(os.environ.get("KILLS", "2"))
_RESTARTS = int(os.environ.get("RESTARTS", "1"))
_SEED = int(os.environ.get("SEED", "7"))


@pytest.fixture(scope="module", autouse=True)
def no_abandoned_labs() -> None:
    remove_abandoned()


@pytest.mark.timeout(300 + 300 * _KILLS)
def test_whatever_is_killed_nothing_survives_and_the_cause_is_named(tmp_path: Path) -> None:
    failed = []
    for number, event in enumerate(events(_KILLS, random.Random(_SEED)), 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            print(f"{number:>2} {happen(event, folder)}", flush=True)
        except (AssertionError, TimeoutError) as error:
            print(f"{number:>2} {event}: {error}", flush=True)
            failed.append(f"{event}: {error}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.timeout(300 + 300 * _RESTARTS)
def test_every_restart_comes_up_at_the_first_attempt(tmp_path: Path) -> None:
    with Lab(2) as lab:
        rounds = restart_by_kills(lab, tmp_path, restarts=_RESTARTS, chance=random.Random(_SEED))
    for one in rounds:
        print(one, flush=True)
    assert [one.restart for one in rounds] == list(range(1, _RESTARTS + 1))
