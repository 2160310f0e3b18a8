"""Heterogeneous jobs: the nodes of all components are the hosts of the run."""

import sys
from pathlib import Path

import pytest

from slurm.slurm_lab import SlurmLab, await_until

pytestmark = pytest.mark.nightly

SCRIPT = """\
import os
import socket
import torch.distributed as dist

dist.init_process_group("gloo")
here = (socket.gethostname(), os.environ.get("SLURM_STEP_GPUS", ""))
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, here)
if dist.get_rank() == 0:
    print(f"hosts: {everybody}", flush=True)
dist.destroy_process_group()
"""


def submit(cluster: SlurmLab, folder: Path, *components: str) -> str:
    """Run the script in a heterogeneous job; return the job's output."""
    (folder / "train.py").write_text(SCRIPT)
    directives = "\n#SBATCH hetjob\n".join(f"#SBATCH {options}" for options in components)
    (folder / "job.sh").write_text(
        f"#!/bin/sh\n#SBATCH --output=job.log\n{directives}\n"
        f"{sys.executable} -m torchmuster run --device cpu --ranks 1 train.py\n"
        "echo exit code $?\n"
    )
    cluster.run("sbatch", f"--chdir={folder}", str(folder / "job.sh"))
    log = folder / "job.log"
    await_until(lambda: log.exists() and "exit code" in log.read_text(), "the end of the job")
    return log.read_text()


def test_the_nodes_of_all_components_are_hosts_in_order(cluster: SlurmLab, tmp_path: Path) -> None:
    # Not the first node: the second component comes after the first, whatever the names are.
    first, second = "--nodes=1 --nodelist=node2 --gres=gpu:2", "--nodes=2 --gres=gpu:1"
    said = submit(cluster, tmp_path, first, f"{second} --nodelist=node[1,3]")
    assert "hosts: [('node2', '0,1'), ('node1', '0'), ('node3', '0')]" in said, said
    assert "exit code 0" in said
