"""From the command to the first all-reduce of two ranks: not much more than bare torchrun takes."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster_command import muster_argv

# So many rounds at least; up to so many more as long as their medians are beyond the limit, for load comes and goes.
ROUNDS = int(os.environ.get("START_UP_ROUNDS", "3"))
MORE_ROUNDS = 12
LIMIT = 1.0
PROCESSES = {
    "torch.distributed.run ": "agent",
    "launch.node ": "node agent",
    "launch.agent ": "agent",
}

# Seconds since the machine's start, as the kernel also tells them of every process.
SCRIPT = """\
import time
now = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
begun = now()
import json, os, sys
import torch, torch.distributed as dist
imported = now()
dist.init_process_group("gloo")
joined = now()
dist.all_reduce(torch.ones(1))
reduced = now()
if dist.get_rank() == 0:
    began, pid = [], os.getpid()
    while pid > 1:  # this process, and those it was started by
        stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        words = open(f"/proc/{pid}/cmdline").read().replace(chr(0), " ")
        began.append((words, int(stat[19]) / os.sysconf("SC_CLK_TCK")))
        pid = int(stat[1])
    with open(sys.argv[1], "w") as out:
        json.dump({"begun": begun, "imported": imported, "joined": joined, "reduced": reduced,
                   "line": began}, out)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Times:
    """When what had happened, in seconds after the command; the last is the first all-reduce."""

    steps: dict[str, float]

    @property
    def whole_s(self) -> float:
        return self.steps["all-reduce"]


def measured(command: Sequence[str], folder: Path) -> Times:
    out = folder / f"times-{time.monotonic_ns()}.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    done = subprocess.run(
        [*command, "train.py", str(out)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    told = json.loads(out.read_text())
    steps = {}
    for words, created in reversed(told["line"]):
        for mark, name in PROCESSES.items():
            if mark in words:
                steps[name] = created - began
    steps["rank"] = told["line"][0][1] - began
    steps["rank's script"] = told["begun"] - began
    steps["torch imported"] = told["imported"] - began
    steps["group"] = told["joined"] - began
    steps["all-reduce"] = told["reduced"] - began
    return Times(steps)


def table(title: str, times: Sequence[Times]) -> str:
    """Return when each step was reached, and what it took (medians)."""
    lines, before = [title], 0.0
    for name in times[0].steps:
        at = statistics.median(one.steps[name] for one in times)
        lines.append(f"  {name:<16} at {at:6.2f} s  (+{at - before:.2f})")
        before = at
    return "\n".join(lines)


@pytest.mark.stress
@pytest.mark.alone
@pytest.mark.ranks
def test_the_first_all_reduce_comes_as_soon_as_with_torchrun(
    own_machine: Path, record_property: Callable[[str, object], None]
) -> None:
    (own_machine / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    commands = {
        "torchrun": [*torchrun, "--nproc-per-node", "2"],
        "muster run": muster_argv(["run", "--device", "cpu", "--ranks", "2"]),
    }
    for command in commands.values():  # once each, so that nobody pays for cold disks
        measured(command, own_machine)
    times: dict[str, list[Times]] = {name: [] for name in commands}
    for number in range(ROUNDS + MORE_ROUNDS):
        # In turns, and each first in turn: load changes while we measure.
        for name in list(commands)[:: 1 if number % 2 else -1]:
            times[name].append(measured(commands[name], own_machine))
        medians = {name: statistics.median(one.whole_s for one in times[name]) for name in commands}
        ratio = medians["muster run"] / medians["torchrun"]
        if number + 1 >= ROUNDS and ratio <= LIMIT:
            break
    for name in commands:
        print(table(name, times[name]))
    load = os.getloadavg()[0]
    count = len(times["torchrun"])
    print(f"medians of {count}: {medians}; {ratio:.3f} times torchrun; load {load:.1f}")
    record_property("ratio", ratio)
    record_property("load", load)
    assert ratio <= LIMIT
