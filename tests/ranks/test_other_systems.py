"""Ranks as on Windows, where rank 0 has the store, tried on this system."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from ranks.launched import cpu, said_by
from torchmuster.launch.history import run_state
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.ranks

# muster, with a node agent that takes this system for Windows.
MUSTER = """\
import sys
from torchmuster.launch.transports import local
local.NODE_AGENT = ("-c", '''
import asyncio, os
from torchmuster.launch.node.connection import PipeConnection
from torchmuster.launch.node.node_agent import NodeAgent
async def keep():
    os._exit(await NodeAgent(PipeConnection(), system="win32").run())
asyncio.run(keep())
''')
from torchmuster.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
SCRIPT = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("no data on rank 1")
dist.barrier()
dist.destroy_process_group()
"""


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-c", MUSTER, *cpu("train.py"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )


def test_ranks_meet_at_the_store_of_rank_0(own_machine: Path) -> None:
    done = run(own_machine)
    assert done.returncode == 0, done
    for rank in (0, 1):
        assert "sum 3.0 False" in said_by(rank, done.stdout)


@pytest.mark.nightly
def test_the_rank_that_fails_is_named(own_machine: Path) -> None:
    done = run(own_machine, "fail")
    assert done.returncode == 1, done
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("failure")]
    assert told.endswith(": ValueError: no data on rank 1")
    (folder,) = list_runs(own_machine / "runs")
    state = run_state.read_state(folder)
    assert state is not None
    assert state.phase == "failed"
