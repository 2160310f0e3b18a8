"""What a user sees of a command is muster's own: no warning or leak report of torch, triton or Python among it."""

import re
from pathlib import Path

import pytest

from muster_command import Muster
from nightly import nightly_except
from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

_WITHIN_S = 3 * GIVE_UP_S  # for plans and what is compiled, where other tests run as well
ADVICE = "Guards may run slower on Python 3.13.0"  # of torch, for one interpreter; not hidden
FOREIGN = re.compile(r"Warning|nanobind|leaked|\b[WE]\d{4} ")
OWN = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.inner(x).relu()


def model():
    return nn.Sequential(nn.Linear(4, 16), Block(), Block(), nn.Linear(16, 3))


def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)
"""
SETTINGS = """\
model: {build: "own:model"}
data: {dataset: "own:data"}
train: {steps: 12, global_batch_size: 8, learning_rate: 0.01, micro_batch_size: 4, log_every: 4}
checkpoint: {every: 6}
"""
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""
CPU = ("--device", "cpu")
TWO = (*CPU, "--ranks", "2")
FSDP = ("--set", "distributed.strategy=fsdp")
HYBRID = ("--set", "distributed.fsdp_sharding_strategy=hybrid_shard")
TRAIN = ("train", "--config", "c.yaml")
COMMANDS: dict[str, tuple[str, ...]] = {
    "check": ("check", *TWO),
    "run": ("run", *TWO, "script.py"),
    "plan": ("plan", "--config", "c.yaml", "--ranks", "2"),
    "train-single": (*TRAIN, *CPU, "--ranks", "1"),
    "train-ddp": (*TRAIN, *TWO, "--set", "distributed.strategy=ddp"),
    "train-fsdp": (*TRAIN, *TWO, *FSDP),
    "train-hybrid": (*TRAIN, *CPU, "--ranks", "4", *FSDP, *HYBRID),
    "train-compile": (*TRAIN, *TWO, "--set", "train.compile=true"),
    "train-recompute": (*TRAIN, *TWO, "--set", "train.activation_checkpointing=selective"),
    "profile": ("profile", *TWO, "--steps", "10:11", "c.yaml"),
    "bench-matmul": ("bench", "matmul", *CPU, "--quick"),
    "bench-precision": ("bench", "precision", *CPU, "--quick"),
    "bench-attention": ("bench", "attention", *CPU, "--quick"),
    "bench-memory": ("bench", "memory", *CPU, "--quick"),
    "bench-data": (
        *("bench", "data", *CPU, "--quick"),
        *("--set", "data.dataset=own:data", "--set", "train.micro_batch_size=4"),
    ),
    "bench-collectives": ("bench", "collectives", *CPU, "--quick"),
    "bench-scaling": ("bench", "scaling", *CPU, "--quick", "--ranks", "1,2"),
}


@pytest.mark.timeout(_WITHIN_S)
@pytest.mark.parametrize("command", nightly_except(["train-ddp"], COMMANDS))
def test_every_line_is_ours(muster: Muster, own_machine: Path, command: tuple[str, ...]) -> None:
    for name, text in {"own.py": OWN, "c.yaml": SETTINGS, "script.py": SCRIPT}.items():
        (own_machine / name).write_text(text)
    done = muster(*command, timeout_s=_WITHIN_S)
    assert done.code == 0, done.err
    logs = [path.read_text(errors="replace") for path in own_machine.rglob("*.log")]
    lines = "\n".join([done.out, done.err, *logs]).splitlines()
    assert [line for line in lines if FOREIGN.search(line) and ADVICE not in line] == []
