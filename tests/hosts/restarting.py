"""Restarting a run again and again by killing its ranks, and seeing that it comes up every time."""

import random
import time
from dataclasses import dataclass
from pathlib import Path

from hosts.killing import Kill, Run
from hosts.lab import Lab

#: Ends well in the round whose number it is given; in all others it goes on until it is killed.
ROUNDS = """
import os, sys, time, torch, torch.distributed as dist
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
print(f"round {number} came up", flush=True)
while number < int(sys.argv[1]):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""
_HOST_OF_RANK = {0: "node1", 1: "node2"}


@dataclass(frozen=True, kw_only=True)
class Round:
    """A restart: who was killed for it, and how long it took from there to the first all-reduce."""

    restart: int
    killed: str
    seconds: float
    pause_s: float


def restart_by_kills(
    lab: Lab, folder: Path, *, restarts: int, chance: random.Random
) -> list[Round]:
    """Kill a random rank in every round but the last; each restart must come up at once.

    As many restarts are allowed as there are kills, so one that does not come up ends the run.
    """
    run = Run.launch(lab, folder, ROUNDS, str(restarts), options=["--max-restarts", str(restarts)])
    rounds: list[Round] = []
    run.wait_for_ranks("round 0 came up")
    for restart in range(1, restarts + 1):
        rank = chance.choice(list(_HOST_OF_RANK))
        killed_s = Kill(victim=f"rank {rank}", host=_HOST_OF_RANK[rank]).strike(run)
        pause_s = 0.0 if restart == 1 else min(2.0 ** (restart - 1), 30.0)
        when = f" in {pause_s:.0f} s" if pause_s else ""
        said = f"(SIGKILL); restarting{when} (restart {restart} of {restarts})"
        line = run.transcript.wait_for(said)
        assert f"rank {rank} on {_HOST_OF_RANK[rank]} failed" in line.text
        run.wait_for_ranks(f"round {restart} came up")
        took_s = time.monotonic() - killed_s
        rounds.append(
            Round(restart=restart, killed=f"rank {rank}", seconds=took_s, pause_s=pause_s)
        )
    assert run.transcript.end() == 0
    assert run.transcript.text("err").count("; restarting") == restarts
    run.wait_until_clean()
    return rounds
