"""A command of torchrun, pasted whole after ``muster run``, does what it did before."""

import re
import sys
from pathlib import Path

import pytest

from muster_command import Muster
from nightly import nightly_except
from ranks.conftest import Python, Torchrun
from ranks.launched import launched, said_by

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")
TRAINING = """\
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator(cpu=True)
points = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("losses", accelerator.gather(loss.detach().reshape(1)).tolist())
accelerator.print(accelerator.num_processes, accelerator.mixed_precision)
accelerator.end_training()
"""
SHOW = """\
import os, sys
if os.environ["RANK"] == "0":
    print("ranks", os.environ["WORLD_SIZE"], sys.argv[1:])
"""


@pytest.mark.nightly
def test_torchrun_pasted_whole_trains_as_under_torchrun(
    torchrun: Torchrun, tmp_path: Path, own_machine: Path
) -> None:
    words = (str(EXAMPLE), "--epochs", "2", "--samples", "1024")
    plain = torchrun(*words)
    assert plain.code == 0, plain
    (tmp_path / "checkpoint.pt").unlink()
    with launched(own_machine, "run", "torchrun", "--nproc_per_node=2", *words) as command:
        done = command.end()
    assert done.code == 0, command
    lines = plain.out.splitlines()
    assert len(re.findall(r"loss \d", plain.out)) == 2
    assert said_by(0, done.out)[-len(lines) :] == lines


@pytest.mark.parametrize(
    "words",
    nightly_except(
        ["torchrun"],
        {
            "python -m torch.distributed.run": (
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node", "2", "show.py", "1"),
            ),
            "torchrun": ("torchrun", "--nproc-per-node", "2", "--tee", "3", "show.py", "1"),
            "--no-python": (
                *("torchrun", "--nproc-per-node", "2"),
                *("--no-python", sys.executable, "show.py", "1"),
            ),
            "python": (sys.executable, "show.py", "1"),
        },
    ),
)
def test_ranks_start_as_they_do_under_torchrun(
    muster: Muster, own_machine: Path, words: tuple[str, ...]
) -> None:
    (own_machine / "show.py").write_text(SHOW)
    done = muster("run", "--device", "cpu", *words)
    assert done.code == 0, done
    ranks = 2 if "2" in words else 1
    assert f"ranks {ranks} ['1']" in done.out


@pytest.mark.integrations
def test_a_script_with_accelerate_gives_the_same_losses(
    python: Python, own_machine: Path, muster: Muster
) -> None:
    (own_machine / "train.py").write_text(TRAINING)
    plain = python(*ACCELERATE, "--multi_gpu", "--num_processes", "2", "train.py")
    assert plain.code == 0, plain
    done = muster("run", "--device", "cpu", "--ranks", "2", "train.py")
    assert done.code == 0, done
    lines = plain.out.splitlines()
    assert sum(line.startswith("losses [") for line in lines) == 4
    assert [line for line in said_by(0, done.out) if line in lines] == lines
