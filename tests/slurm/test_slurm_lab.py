"""The lab cleans up after tests that were killed, and leaves the labs of others alone."""

import os
import subprocess
import sys
from pathlib import Path

from patience import GIVE_UP_S
from slurm.slurm_lab import await_until, remove_abandoned


def test_only_labs_of_dead_tests_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, used = f"musl{ended.pid}-9-node1", f"musl{os.getpid()}-9-node1"
    for namespace in (abandoned, used):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    sleeper = subprocess.Popen(["ip", "netns", "exec", abandoned, "sleep", "60"])
    inside = ["ip", "netns", "pids", abandoned]
    try:
        await_until(lambda: bool(subprocess.check_output(inside)), "the sleeper is there")
        remove_abandoned()
        assert not Path("/run/netns", abandoned).exists()
        assert Path("/run/netns", used).exists()
        assert sleeper.wait(timeout=GIVE_UP_S) == -9
    finally:
        sleeper.kill()
        sleeper.wait()
        subprocess.run(["ip", "netns", "del", used], check=True)
