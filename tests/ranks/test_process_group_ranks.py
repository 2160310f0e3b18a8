"""The classic functions in programs of several ranks: under torchrun, and spawned without it."""

import json
import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from ranks.conftest import Python, Torchrun
from ranks.launched import line_with

pytestmark = pytest.mark.ranks

PREAMBLE = """
import json, logging, os, sys, time
import torch.distributed as dist
from torchmuster.distributed import (
    cleanup_distributed, get_group_info, get_local_rank, setup_distributed, verify_gpu_communication
)
from torchmuster.errors import MusterError
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def say(**facts):
    sys.stdout.write(f"[rank {rank}] {json.dumps(facts, default=str)}\\n")
    sys.stdout.flush()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def test_under_torchrun_unchanged(
    torchrun: Torchrun, program: Path, snapshot: SnapshotAssertion
) -> None:
    program.write_text(
        f"{PREAMBLE}\n"
        "try:\n"
        "    device = setup_distributed(rank, world_size, backend='nccl')\n"
        "    say(device=device, local=get_local_rank(), info=get_group_info(),\n"
        "        good=verify_gpu_communication(rank, world_size), size=dist.get_world_size())\n"
        "finally:\n"
        "    cleanup_distributed()\n"
        "    cleanup_distributed()\n"
    )
    ran = torchrun(str(program))
    assert ran.code == 0, ran.err
    for rank in (0, 1):
        (line,) = ran.of_rank(rank)
        said = json.loads(line)
        assert (said["device"], said["local"], said["good"], said["size"]) == ("cpu", rank, True, 2)
        assert (said["info"]["backend"], said["info"]["simulated"]) == ("gloo", False)
        assert "gloo instead of nccl" in said["info"]["reasons"][0]
        reason, here, _why = said["info"]["reasons"][0].partition(": torch ")
        assert here  # what this torch lacks depends on its build
        assert reason == snapshot(name="reason")


@pytest.mark.nightly
def test_a_rank_that_contributes_a_wrong_number_is_seen_by_all(
    torchrun: Torchrun, program: Path, snapshot: SnapshotAssertion
) -> None:
    program.write_text(
        f"{PREAMBLE}\n"
        "setup_distributed(rank, world_size, 'gloo')\n"
        "good = verify_gpu_communication(rank if rank == 0 else 5, world_size)\n"
        "say(good=good)\n"
        "dist.barrier()\n"
        "cleanup_distributed()\n"
    )
    ran = torchrun(str(program))
    assert ran.code == 0, ran.err
    assert [json.loads(ran.of_rank(rank)[0])["good"] for rank in (0, 1)] == [False, False]
    wrong = line_with(ran.err, "rank 0 (cpu): ", "is 7, expected 3 ")
    assert wrong == snapshot


@pytest.mark.nightly
def test_a_rank_that_does_not_answer_is_a_false_in_time(torchrun: Torchrun, program: Path) -> None:
    program.write_text(
        f"{PREAMBLE}\n"
        "from torch.distributed.distributed_c10d import _get_default_store\n"
        "setup_distributed(rank, world_size, 'gloo')\n"
        "store = _get_default_store()\n"
        "if rank == 0:\n"
        "    good = verify_gpu_communication(rank, world_size, timeout_s=1)\n"
        "    cleanup_distributed()\n"
        "    say(good=good)\n"
        "    store.set('done', '')\n"
        "else:\n"
        "    store.wait(['done'])  # stuck, as rank 0 sees it, until rank 0 has ended\n"
        "    cleanup_distributed()\n"
    )
    ran = torchrun(str(program))
    assert ran.code == 0, ran.err
    said = json.loads(ran.of_rank(0)[0])
    assert said["good"] is False
    assert "communication failed on rank 0 (cpu): " in ran.err


@pytest.mark.nightly
def test_another_size_than_torchruns_is_refused_on_every_rank(
    torchrun: Torchrun, program: Path
) -> None:
    program.write_text(
        f"{PREAMBLE}\n"
        "try:\n"
        "    setup_distributed(rank, 3, 'gloo')\n"
        "except MusterError as refusal:\n"
        "    say(what=refusal.what)\n"
    )
    ran = torchrun(str(program))
    expected = "setup_distributed was called with world_size=3, but WORLD_SIZE=2 is set"
    assert [json.loads(ran.of_rank(rank)[0])["what"] for rank in (0, 1)] == [expected] * 2


@pytest.mark.nightly
def test_one_rank_without_a_gpu_takes_all_to_gloo(
    torchrun: Torchrun, program: Path, snapshot: SnapshotAssertion
) -> None:
    # Rank 0 is made to believe in a GPU; only the choice is looked at.
    program.write_text(
        f"{PREAMBLE}\n"
        "import torch\n"
        "from torchmuster.launch.probes import process_group\n"
        "from torchmuster.launch.probes.membership import BackendFacts\n"
        "if rank == 0:\n"
        "    here = BackendFacts(system='linux', torch_version='2', accelerator='cuda',\n"
        "                        device_count=2, libraries=frozenset({'nccl'}))\n"
        "    process_group.backend_facts = lambda: here\n"
        "    torch.accelerator.set_device_index = lambda index: None\n"
        "setup_distributed(rank, world_size)\n"
        "say(info=get_group_info())\n"
        "dist.barrier()\n"
        "cleanup_distributed()\n"
    )
    ran = torchrun(str(program))
    assert ran.code == 0, ran.err
    first, second = (json.loads(ran.of_rank(rank)[0])["info"] for rank in (0, 1))
    assert (first["backend"], second["backend"]) == ("gloo", "gloo")
    reason = first["reasons"][-1]
    assert f"rank 1 on {socket.gethostname()}: gloo instead of nccl" in reason
    reason = reason.replace(f" on {socket.gethostname()}: ", " on HOST: ")
    assert reason.partition(": torch ")[0] == snapshot
    assert (first["device"], second["device"]) == ("cuda:0", "cpu")


def test_spawned_ranks_meet_on_loopback_without_a_launcher(python: Python, program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program.write_text(
        "import psutil, sys\n"
        "import torch.multiprocessing as mp\n"
        "from torchmuster.distributed import *\n"
        "def train(rank, world_size):\n"
        "    try:\n"
        f"        device = setup_distributed(rank, world_size, timeout_s={GIVE_UP_S})\n"
        "        good = verify_gpu_communication(rank, world_size)\n"
        "        listening = {one.laddr.ip for one in psutil.Process().net_connections()\n"
        "                     if one.status == 'LISTEN'}\n"
        "        sys.stdout.write(f'[rank {rank}] {device} {good} {listening}\\n')\n"
        "    finally:\n"
        "        cleanup_distributed()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(train, (2,), nprocs=2)\n"
    )
    ran = python(str(program), env={"MASTER_PORT": str(port)})
    assert ran.code == 0, ran.err
    expected = ["cpu True {'127.0.0.1'}"]
    assert [ran.of_rank(rank) for rank in (0, 1)] == [expected, expected]
