"""GPUs as muster lists, chooses and claims them: against nvidia-smi and torch."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.conftest import Muster
from torchmuster.errors import ExitCode

MIB = 2**20


def listed_gpus(muster: Muster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(muster("gpus", "--json"))["accelerators"]
    return found


def test_gpus_are_those_of_nvidia_smi(muster: Muster) -> None:
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    expected = {}
    for uuid, name, mib in csv.reader(listed.splitlines(), skipinitialspace=True):
        expected[uuid] = (name, int(mib))
    ours = {}
    for gpu in listed_gpus(muster):
        if gpu["mig_index"] is None:
            ours[gpu["uuid"]] = (gpu["name"], gpu["total_bytes"] // MIB)
    assert ours == expected


@pytest.mark.gpus(2)
def test_each_rank_gets_a_gpu_of_its_own(muster: Muster, tmp_path: Path) -> None:
    Path("uuid.py").write_text(
        "import os, torch\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid\n"
        "open('uuid-' + os.environ['RANK'], 'w').write(str(uuid))\n"
    )
    muster("run", "--num-gpus", "2", "uuid.py")
    seen = {Path(f"uuid-{rank}").read_text().removeprefix("GPU-") for rank in range(2)}
    assert len(seen) == 2
    assert seen <= {gpu["uuid"].removeprefix("GPU-") for gpu in listed_gpus(muster)}


def test_a_claimed_gpu_is_not_given_again(muster: Muster) -> None:
    picked = muster("gpus", "pick", "--num-gpus", "1").split()
    count = str(len([gpu for gpu in listed_gpus(muster) if gpu["mig_index"] is None]))
    claiming = [sys.executable, "-m", "torchmuster", "gpus", "pick", "--num-gpus", "1", "--"]
    script = "print('claimed', flush=True); input()"
    with subprocess.Popen(
        [*claiming, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        muster("gpus", "pick", "--num-gpus", count, exit_codes=(ExitCode.NOT_NOW,))
        holder.communicate("\n")
    assert muster("gpus", "pick", "--num-gpus", "1").split() == picked


def test_cuda_has_started_only_after_its_start() -> None:
    program = (
        "from torchmuster.devices.cuda_driver import cuda_has_started as started\n"
        "before = started()\n"
        "import torch\n"
        "imported = started()\n"
        "torch.cuda.init()\n"
        "print(before, imported, started())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False True\n", done.stderr
