"""The store of the ranks outlives rank 0, needs no descriptor in the ranks, and has a port of its own."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

CPU = ("run", "--device", "cpu", "--ranks", "2")
SUM = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "port", os.environ["MASTER_PORT"], flush=True)
dist.destroy_process_group()
"""
# Rank 0 leaves; the others go on with the store.
RANK_0_LEAVES = """\
import os, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    print("left", flush=True)
    os._exit(0)
import time
peer = 3 - rank
time.sleep(1.0)  # rank 0 has exited
store.set(f"from {rank}", str(rank))
assert store.get(f"from {peer}") == str(peer).encode()
print("met", peer, flush=True)
os._exit(0)
"""
# Closes all descriptors but the standard ones, as some wrappers do.
WRAPPER = """\
#!/bin/bash
for descriptor in /proc/self/fd/*; do
  number=$(basename "$descriptor")
  [ "$number" -gt 2 ] && eval "exec $number>&-"
done
exec "$@"
"""


def muster(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start ``muster`` with the CPU and these words."""
    return subprocess.Popen(
        [sys.executable, "-m", "torchmuster", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(run: "subprocess.Popen[str]") -> str:
    """Return what a run that succeeds prints."""
    output, _ = run.communicate(timeout=GIVE_UP_S)
    assert run.returncode == 0, output
    return output


def test_wrapper_may_close_all_descriptors(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(SUM)
    (own_machine / "wrapper.sh").write_text(WRAPPER)
    (own_machine / "wrapper.sh").chmod(0o755)
    words = ["--no-python", "./wrapper.sh", sys.executable, "train.py"]
    torchrun = ["torchrun", "--nproc-per-node", "2", *words]
    output = output_of(muster(own_machine, "run", "--device", "cpu", *torchrun))
    assert "[all 2 ranks] sum 3.0" in output


def test_rank_0_may_end_first(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(RANK_0_LEAVES)
    output = output_of(muster(own_machine, "run", "--device", "cpu", "--ranks", "3", "train.py"))
    assert "met 1" in output
    assert "met 2" in output


def test_runs_at_the_same_time_have_ports_of_their_own(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(SUM)
    runs = [muster(own_machine, *CPU, "train.py") for _ in range(2)]
    ports = []
    for run in runs:
        lines = [line for line in output_of(run).splitlines() if "sum 3.0" in line]
        ports.append({line.rpartition(" ")[2] for line in lines})
    assert [len(port) for port in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_restart_has_an_empty_store(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(
        SUM.replace(
            "dist.destroy_process_group()",
            """\
store = dist.distributed_c10d._get_default_store()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert store.add("attempts", 1) <= 2
dist.barrier()
if attempt == "0" and dist.get_rank() == 1:
    os._exit(3)
print("attempt", attempt, flush=True)
dist.destroy_process_group()""",
        )
    )
    output = output_of(muster(own_machine, *CPU, "--max-restarts", "1", "train.py"))
    assert "[all 2 ranks] attempt 1" in output


def test_store_that_ends_ends_the_run(own_machine: Path) -> None:
    script = SUM + "import time\ntime.sleep(600)\n"
    (own_machine / "train.py").write_text(script.replace("dist.destroy_process_group()", ""))
    run = muster(own_machine, *CPU, "train.py")
    assert run.stdout is not None
    lines = []
    while not any("sum 3.0" in line for line in lines):
        lines.append(run.stdout.readline())
    below = psutil.Process(run.pid).children(recursive=True)
    (store,) = [process for process in below if process.cmdline()[-1].endswith("/node/store.py")]
    store.kill()
    output, _ = run.communicate(timeout=GIVE_UP_S)
    assert run.returncode == 1
    assert "the ranks' store exited with code -9" in output
