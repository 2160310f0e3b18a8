"""What is known of ranks that hang in an unmodified script: from outside their process group, whatever they do."""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import GIVE_UP_S
from ranks.launched import Launched, cpu, launched
from torchmuster.launch.history import evidence

pytestmark = pytest.mark.ranks

HOST = os.uname().nodename

_SCRIPT = """\
import ctypes, os, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 4
    def __getitem__(self, place):
        if place: time.sleep(600)
        return place

def load():
    for batch in DataLoader(Slow(), batch_size=1):
        pass

def trained_beside():
    dist.all_reduce(torch.ones(1))
    load()

def forked():
    for batch in DataLoader(list(range(8)), num_workers=2):
        pass
    print("has forked", flush=True)
    time.sleep(600)

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    beside = threading.Thread(target=trained_beside, daemon=True)
    beside.start()
    beside.join()
dist.all_reduce(torch.ones(1))
if rank == 2: ctypes.PyDLL(None).sleep(600)
if rank == 3: forked()
dist.all_reduce(torch.ones(4, 5))
"""


def heartbeats(
    run: Launched, where: Path, good: Callable[[dict[int, Any]], bool]
) -> dict[int, Any]:
    """Return the heartbeats by rank as soon as they are as wanted."""
    deadline = time.monotonic() + GIVE_UP_S
    found: dict[int, Any] = {}
    while time.monotonic() < deadline:
        for path in where.glob("torchmuster-*/attempt-0/rank-*.heartbeat.json"):
            found[int(path.name.split("-")[1].split(".")[0])] = json.loads(path.read_text())
        if good(found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{found}\n{run}")


@pytest.fixture
def where() -> Iterator[Path]:
    """A folder for temporary files, with a short name: loaders make sockets below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_ranks_do_is_known_and_kept(own_machine: Path, where: Path) -> None:
    (own_machine / "train.py").write_text(_SCRIPT)
    with launched(own_machine, *cpu("train.py", ranks=4), env={"TMPDIR": str(where)}) as run:
        run.wait_for("has forked")
        # Rank 1 trains in another thread than the main one: which, its collectives tell.
        found = heartbeats(
            run,
            where,
            lambda all_: (
                len(all_) == 4
                and all_[0]["begun"] == {"0": 2}  # and not the first, as a while ago
                and bool(all_[0]["waits"] and all_[1]["begun"])
                and all_[3]["doing"] == "time.sleep"
            ),
        )
        waits, loads, forked = (found[rank] for rank in (0, 1, 3))
        assert (waits["place"], waits["doing"]) == ("train.py:35", "all_reduce")
        assert waits["waiting"] is True
        assert waits["begun"] == {"0": 2}
        collective = {"number": 2, "operation": "all_reduce", "shapes": "[4, 5]", "dtype": "Float"}
        assert waits["waits"] == [{"group": "0", **collective}]
        assert waits["groups"] == loads["groups"] == ["0"]
        assert loads["begun"] == {"0": 1}
        found = heartbeats(run, where, lambda all_: bool(all_[1]["place"].endswith("__getitem__")))
        loads = found[1]
        assert loads["place"] == "train.py:9 in __getitem__"
        assert (loads["doing"], loads["phase"]) == ("time.sleep", "loading data")
        assert (loads["waiting"], loads["waits"]) == (False, [])
        assert (forked["place"], forked["doing"]) == ("train.py:24 in forked", "time.sleep")
        alive = {one.pid for one in run.alive()}
        assert {one["pid"] for one in found.values()} <= alive

        os.kill(forked["pid"], signal.SIGSTOP)
        run.wait_for(f"rank 3 on {HOST} has been stopped")
        run.wait_for_more("stacks and collectives of the ranks are in")
        # Where this took long, it was told before that the others wait.
        *_, hang = [
            one for one in evidence.read_hangs(run.run) if one.finding.name == "rank-stopped"
        ]
        stacks = {rank: _stacks(hang.folder, rank) for rank in range(4)}
        assert "dist.all_reduce(torch.ones(4, 5))" in stacks[0]
        assert "if place: time.sleep(600)" in stacks[1]
        assert "Python code cannot run in this process" in stacks[2]
        assert 'train.py", line 33 in <module>' in stacks[2]
        assert "process state: T" in stacks[3]
        flight = json.loads((hang.folder / "rank-0.flight.json").read_text())
        assert flight["entries"][-1]["profiling_name"] == "gloo:all_reduce"

        run.send(signal.SIGINT)
        run.end()
        assert "the ranks are alive" not in str(run)
        run.wait_until_nothing_lives()


def _stacks(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.stacks.txt").read_text()


@pytest.mark.nightly
def test_a_heartbeat_costs_less_than_a_thousandth(own_machine: Path) -> None:
    """Measured inside a real rank whose flight recorder is full, with a deep stack."""
    (own_machine / "train.py").write_text(
        "import sys, threading, time\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(2100): dist.all_reduce(torch.ones(2))\n"
        "from pathlib import Path\n"
        "from torchmuster.launch.rank.heartbeat import HeartbeatWriter\n"
        "writer = HeartbeatWriter(0, Path('.'))\n"
        "def measure(costs):\n"
        "    for _ in range(101):\n"
        "        began = time.thread_time(); writer.beat(); costs.append(time.thread_time() - began)\n"
        "def deep(left):\n"
        "    if left: return deep(left - 1)\n"
        "    costs = []\n"
        "    thread = threading.Thread(target=measure, args=(costs,)); thread.start(); thread.join()\n"
        "    print('a beat takes', sorted(costs)[50] * 1e6, 'us', flush=True)\n"
        "deep(60)\n"
        "dist.destroy_process_group()\n"
    )
    with launched(own_machine, *cpu("train.py", ranks=1)) as run:
        result = run.end()
    assert result.code == 0, result
    found = re.search(r"a beat takes ([\d.]+) us", result.out)
    assert found is not None
    assert float(found[1]) < 1000  # of every second
