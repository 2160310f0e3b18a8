"""A command of torchrun or accelerate, pasted whole after ``muster run``, does what it did before."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from muster_command import Muster
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
SETTINGS = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
gpu_ids: all
use_cpu: false
"""
VARIABLES = """\
import json, os, sys
of_accelerate = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "MEGATRON_")
if os.environ["RANK"] == "0":
    shown = {name: value for name, value in os.environ.items() if name.startswith(of_accelerate)}
    print("ranks", os.environ["WORLD_SIZE"], sys.argv[1:], json.dumps(shown, sort_keys=True))
"""


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
    assert "muster: --nproc_per_node 2: --ranks 2\n" in done.err


@pytest.mark.parametrize(
    "words",
    [
        (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "show.py", "1"),
        ("--nproc-per-node", "2", "--tee", "3", "show.py", "1"),
        ("torchrun", "--nproc-per-node", "2", "--no-python", sys.executable, "show.py", "1"),
        (sys.executable, "show.py", "1"),
    ],
    ids=["python -m torch.distributed.run", "flags", "--no-python", "python"],
)
def test_ranks_start_as_they_do_under_torchrun(
    muster: Muster, own_machine: Path, words: tuple[str, ...]
) -> None:
    (own_machine / "show.py").write_text(VARIABLES)
    done = muster("run", "--device", "cpu", *words)
    assert done.code == 0, done
    ranks = 2 if "2" in words else 1
    assert f"ranks {ranks} ['1'] " in done.out


def test_accelerate_gives_the_same_losses(
    python: Python, own_machine: Path, muster: Muster
) -> None:
    (own_machine / "train.py").write_text(TRAINING)
    (own_machine / "settings.yaml").write_text(SETTINGS)
    words = ("--config_file", "settings.yaml", "train.py")
    plain = python(*ACCELERATE, *words)
    assert plain.code == 0, plain
    done = muster("run", "accelerate", "launch", *words, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done
    lines = plain.out.splitlines()
    assert sum(line.startswith("losses [") for line in lines) == 4
    assert lines[-1] == "2 bf16"
    assert [line for line in said_by(0, done.out) if line in lines] == lines
    assert "muster: --num_processes 2: --ranks 2\n" in done.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--multi_gpu", "--mixed_precision", "fp16", "--dynamo_backend", "inductor"),
        ("--use_fsdp", "--fsdp_version", "2", "--fsdp-offload-params", "true"),
    ],
    ids=["multi_gpu", "fsdp"],
)
def test_the_variables_are_those_of_accelerate(
    python: Python, own_machine: Path, muster: Muster, flags: tuple[str, ...]
) -> None:
    (own_machine / "show.py").write_text(VARIABLES)
    words = (*flags, "--num_processes", "2", "show.py", "--lr", "1")
    home = {"HF_HOME": str(own_machine / "hf")}  # without a default settings file
    plain = python(*ACCELERATE, *words, env=home)
    assert plain.code == 0, plain
    (expected,) = plain.out.splitlines()
    done = muster("run", "accelerate", "launch", *words, env=home)
    assert done.code == 0, done
    assert expected in said_by(0, done.out)
    assert len(json.loads(expected.partition("] ")[2])) > 5


def test_what_accelerate_refuses_starts_nothing(own_machine: Path, muster: Muster) -> None:
    (own_machine / "train.py").touch()
    done = muster("run", "accelerate", "launch", "--num_proceses", "2", "train.py")
    assert done.code == 2
    assert "did you mean --num_processes?" in done.err
    done = muster("run", "accelerate", "launch", "--multi_gpu", "--cpu", "train.py")
    assert done.code == 2
    assert "You can only use one of" in " ".join(done.err.split())
    done = muster("run", "accelerate", "launch", "--tpu", "train.py")
    assert done.code == 2
    assert "TPUs" in done.err
    assert not (own_machine / "runs").exists()


def test_a_default_settings_file_is_read(own_machine: Path, muster: Muster) -> None:
    (own_machine / "show.py").write_text(VARIABLES)
    folder = own_machine / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(
        SETTINGS.replace("num_processes: 2", "num_processes: 3")
    )
    env = {"HF_HOME": str(own_machine / "hf"), "OMP_NUM_THREADS": "1"}
    done = muster("run", "--dry-run", "accelerate", "launch", "show.py", env={**os.environ, **env})
    assert done.code == 0, done
    assert "this machine: 3 ranks" in done.out
    assert "    ACCELERATE_MIXED_PRECISION=bf16\n" in done.out
