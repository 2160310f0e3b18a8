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

ROUNDS = int(os.environ.get("START_UP_ROUNDS", "5"))
LIMIT = 1.15

# The times of all processes on this machine are comparable; psutil is imported when all is measured.
SCRIPT = """\
import time
begun = time.time()
import json, os, sys
import torch, torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
joined = time.time()
dist.all_reduce(torch.ones(1))
reduced = time.time()
if dist.get_rank() == 0:
    import psutil
    line = [psutil.Process(), *psutil.Process().parents()]
    began = [(" ".join(one.cmdline()), one.create_time()) for one in line]
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
    began = time.time()
    done = subprocess.run(
        [*command, "train.py", str(out)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    told = json.loads(out.read_text())
    steps = {}
    for words, created in reversed(told["line"]):
        for name, mark in (
            ("keeper", "launch.keeper"),
            ("agent", "launch.agent RECORDS"),
            ("agent", "launch.agent "),
            ("agent", "distributed.run"),
        ):
            if mark in words:
                steps[name] = created - began
                break
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
@pytest.mark.ranks
@pytest.mark.timeout(600)
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
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(measured(command, own_machine))
    medians = {name: statistics.median(one.whole_s for one in times[name]) for name in commands}
    ratio = medians["muster run"] / medians["torchrun"]
    for name in commands:
        print(table(name, times[name]))
    load = os.getloadavg()[0]
    print(f"medians of {ROUNDS}: {medians}; {ratio:.3f} times torchrun; load {load:.1f}")
    record_property("ratio", ratio)
    record_property("load", load)
    assert ratio <= LIMIT
