"""The largest micro-batch on real ranks: the weakest one decides."""

from pathlib import Path

import pytest

from own_training import MODEL, write_model
from torchmuster.errors import MusterError
from torchmuster.plan.job import Candidate
from torchmuster.plan.real_steps import find_batch_size, run_real_steps
from torchmuster.train.strategies.sharding import ShardLayout

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]

# As an accelerator does it, on one rank only.
SHORT = """
        if torch.distributed.get_rank() == 1 and len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


def candidate(size: int) -> Candidate:
    copies = ShardLayout(copies=2, shards=1)
    return Candidate(strategy="ddp", layout=copies, micro_batch_size=size)


@pytest.mark.parametrize("planned", [4, 8])
def test_the_weakest_rank_decides(planned: int, own_machine: Path) -> None:
    work = write_model(own_machine)
    start = "    def forward(self, x):\n        for layer"
    code = MODEL.replace(start, f"    def forward(self, x):{SHORT}        for layer")
    (own_machine / "own.py").write_text(code)
    finding = find_batch_size(work, candidate(planned), device="cpu", samples=None)
    assert "--set train.micro_batch_size=4 " in finding.fix
    assert "micro-batch 4 fits" in finding.evidence
    assert "micro-batches of 8 ran out of memory on rank 1" in finding.evidence


def test_another_failure_is_no_verdict_on_memory(own_machine: Path) -> None:
    work = write_model(own_machine)
    (own_machine / "own.py").write_text("def model():\n    raise ValueError('no such luck')\n")
    with pytest.raises(MusterError) as refused:
        run_real_steps(work, candidate(1), device="cpu", steps=0)
    assert refused.value.what == "the real steps failed"
    assert "no such luck" in refused.value.why
