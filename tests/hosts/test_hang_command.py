"""``muster hang --hosts``: a job of plain torchrun on two machines, one rank of which hangs on the other one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.host import HostProcess
from hosts.lab import Lab
from hosts.namespaces import await_true
from muster_command import muster_argv

pytestmark = pytest.mark.nightly

_SCRIPT = """\
import time, torch, torch.distributed as dist
from pathlib import Path
def read(rank):
    if rank == 1:
        Path("holds").touch()
        time.sleep(600)
def step():
    dist.all_reduce(torch.ones(1))
dist.init_process_group("gloo")
step()
read(dist.get_rank())
step()
"""


def torchrun(lab: Lab, folder: Path) -> list[HostProcess]:
    """Start the script by torchrun on both hosts, as one types it there."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    where = [f"--master-addr={lab.hosts[0].address}", "--master-port=29555"]
    return [
        host.popen(
            [*agent, *where, f"--node-rank={number}", "train.py"],
            cwd=folder,
            env={"GLOO_SOCKET_IFNAME": "eth0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number, host in enumerate(lab.hosts)
    ]


def test_a_rank_on_another_machine_is_named(lab2: Lab, tmp_path: Path) -> None:
    node1, node2 = lab2.hosts
    (tmp_path / "train.py").write_text(_SCRIPT)
    agents = torchrun(lab2, tmp_path)
    await_true("the rank hangs", (tmp_path / "holds").exists)
    alone = node1.run(muster_argv(["hang", "--json"]), cwd=tmp_path)
    both = node1.run(muster_argv(["hang", "--hosts", "node2", "--json"]), cwd=tmp_path)
    away = node1.run(muster_argv(["hang", "--hosts", "node2,node9", "--json"]), cwd=tmp_path)
    for agent in agents:
        agent.kill()
    # Alone, a host only knows that its rank waits for the other one.
    (unseen,) = json.loads(alone.stdout)["findings"]
    assert (alone.returncode, unseen["name"]) == (1, "collective-does-not-end"), alone
    told = json.loads(both.stdout)
    (finding,) = told["findings"]
    assert (both.returncode, finding["name"]) == (1, "rank-elsewhere"), both
    assert finding["what"].startswith("rank 1 on node2 keeps the others waiting: in time.sleep ")
    assert [(one["rank"], one["host"]) for one in told["ranks"]] == [(0, "node1"), (1, "node2")]
    assert told["ranks"][1]["place"] == "train.py:6 in read"
    assert told["ranks"][0]["place"] == "train.py:8 in step"
    # A host that cannot be reached does not hide what the others show.
    names = [one["name"] for one in json.loads(away.stdout)["findings"]]
    assert names == ["rank-elsewhere", "host-name-unknown"], away
    assert node2.is_up
