"""NCCL: values, transports, and the report of a hang or an error."""

import json
import re
from pathlib import Path

import pytest

from gpu.conftest import Muster
from torchmuster import explain_text

pytestmark = pytest.mark.gpus(2)

# Integers below 2**24 are exact in float32, below 2**8 in bfloat16: any order of the sum gives the same value.
EXACT_VALUES = """\
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
for kind, high in ((torch.float32, 2**20), (torch.bfloat16, 7)):
    for count in (2**8, 2**14, 2**22):
        pattern = torch.arange(count, device="cuda") % high
        value = (pattern + rank).to(kind)
        dist.all_reduce(value)
        expected = pattern * ranks + ranks * (ranks - 1) // 2
        assert torch.equal(value, expected.to(kind)), (kind, count)

        parts = torch.empty(ranks * count, dtype=kind, device="cuda")
        dist.all_gather_into_tensor(parts, (pattern + rank).to(kind))
        for other, part in enumerate(parts.chunk(ranks)):
            assert torch.equal(part, (pattern + other).to(kind)), (kind, count)

        share = torch.empty(count // ranks, dtype=kind, device="cuda")
        dist.reduce_scatter_tensor(share, (pattern + rank).to(kind)[: count // ranks * ranks])
        first = rank * len(share)
        assert torch.equal(share, expected[first : first + len(share)].to(kind)), (kind, count)
dist.destroy_process_group()
print("exact")
"""

HANGS = """\
import os, time
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
for number in range(20):
    if number == 12 and dist.get_rank() == 1:
        time.sleep(3600)
    value = torch.ones(8, device="cuda")
    dist.all_reduce(value)
    value.sum().item()
"""

# By the name of the rule that must explain the error.
MISTAKES = {
    "device-side-assert": """\
scores = torch.zeros(4, 10, device="cuda")
torch.nn.functional.cross_entropy(scores, torch.full((4,), 10, device="cuda"))
torch.cuda.synchronize()
""",
    "gpu-out-of-memory": """\
total = torch.cuda.get_device_properties(0).total_memory
torch.empty(2 * total, dtype=torch.uint8, device="cuda")
""",
    "duplicate-gpu": """\
torch.distributed.init_process_group("nccl")
torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
""",
}


@pytest.mark.parametrize("without_p2p", [False, True])
def test_collectives_are_exact(muster: Muster, without_p2p: bool, tmp_path: Path) -> None:
    Path("exact.py").write_text(EXACT_VALUES)
    environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p")}
    if without_p2p:
        environment["NCCL_P2P_DISABLE"] = "1"
    muster("run", "--num-gpus", "2", "exact.py", **environment)
    if without_p2p:
        logs = "".join(log.read_text(errors="replace") for log in tmp_path.glob("nccl.*"))
        transports = set(re.findall(r"\bvia ([A-Z0-9]+)", logs))
        assert transports, "NCCL's log names no transport"
        assert "P2P" not in transports


def test_the_rank_that_hangs_is_named(muster: Muster) -> None:
    Path("hangs.py").write_text(HANGS)
    flags = ("--num-gpus", "2", "--set", "launch.grace=2s", "--set", "launch.end_hangs_after=25s")
    muster("run", *flags, "hangs.py", exit_codes=(1,))
    findings = json.loads(muster("explain", "--json", exit_codes=(0, 1)))["findings"]
    cause = next(finding for finding in findings if finding["status"] == "failure")
    assert cause["what"].startswith("rank 1 ")
    assert "hangs.py:9" in json.dumps(cause)
    assert "all_reduce" in json.dumps(findings)


@pytest.mark.parametrize("rule", MISTAKES)
def test_the_cause_of_an_error_is_explained(muster: Muster, rule: str) -> None:
    Path("fails.py").write_text("import torch\ntorch.cuda.set_device(0)\n" + MISTAKES[rule])
    muster("run", "--num-gpus", "2", "fails.py", exit_codes=(1,))
    first = json.loads(muster("explain", "--json", exit_codes=(0, 1)))["findings"][0]
    rules = explain_text(first["what"] + "\n" + first["evidence"])
    assert rules[0].name == rule, first
