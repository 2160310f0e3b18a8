"""One rank runs out of memory: all end soon, and what is told first is that rank's memory."""

import os
from pathlib import Path

import pytest

from ranks.launched import cpu, launched

pytestmark = pytest.mark.ranks
HOST = os.uname().nodename

# Rank 1 of 3 asks for far too much in the third step; the others wait for its gradients.
SCRIPT = """\
import os, resource, sys, torch
from torch import nn
from torchmuster.train.out_of_memory import oom_report
from torchmuster.train.world import join_world

class Greedy(nn.Linear):
    def forward(self, x):
        if steps == 2 and int(os.environ["RANK"]) == 1:
            print("asks", flush=True)
            resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))
            torch.ones(2**32)
        return super().forward(x)

with join_world("cpu") as world:
    model = nn.parallel.DistributedDataParallel(Greedy(100, 100))
    optimizer = torch.optim.Adam(model.parameters())
    with oom_report(world, model, optimizer, micro_batch_size=8):
        for steps in range(1000000):
            model(torch.ones(8, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_all_ranks_end_and_the_table_is_told(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(SCRIPT)
    with launched(own_machine, *cpu("train.py", ranks=3), env={"COLUMNS": "400"}) as command:
        command.wait_for("asks")
        result = command.end()
        command.wait_until_nothing_lives()
    assert result.code == 1
    (headline,) = [line for line in result.err.splitlines() if line.startswith("failure  ")]
    assert f"rank 1 on {HOST} (cpu) " in headline
    assert "Slurm" not in result.err
    for line in (
        "you tried to allocate 17179869184 bytes",
        "parameters                   39.5 KiB",
        "optimizer states             78.9 KiB",
        "(train.micro_batch_size: 4 instead of 8)",
    ):
        assert line in result.err
