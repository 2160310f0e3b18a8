"""What is promised in seconds, on several hosts. Run one by one: ``pytest -m alone -n 0``."""

from pathlib import Path

import pytest

from hosts.killing import SCRIPTS, Kill, Run
from hosts.lab import Lab
from patience import within

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(("victim", "host"), [("rank 1", "node2"), ("launcher", "node1")])
def test_fifteen_seconds_after_a_kill_nothing_of_a_run_is_left_on_any_host(
    lab2: Lab, tmp_path: Path, victim: str, host: str
) -> None:
    run = Run.launch(lab2, tmp_path, SCRIPTS["running"], options=["--set", "launch.grace=1s"])
    run.wait_for_phase("running")
    with within(15, f"after a kill of {victim}, a run is gone"):
        Kill(victim=victim, host=host).strike(run)
        run.wait_until_clean()
    run.end()
