"""A training held against its plan: what is kept, and the one line that is said."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate
from torchmuster.plan.proof import comparison
from torchmuster.plan.proof.comparison import MeasuredRun, Promise, comparison_line
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

PROMISE = Promise(
    candidate=Candidate(
        strategy="fsdp", layout=ShardLayout(copies=1, shards=8), recompute=2, micro_batch_size=4
    ),
    hardware="8 x H100",
    tensor_bytes=40 * GiB,
    step_s=2.0,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert comparison.read_promise(tmp_path) is None
    comparison.write_promise(tmp_path, PROMISE)
    assert comparison.read_promise(tmp_path) == PROMISE


def test_what_is_no_plan_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "plan.json").write_text('{"candidate": 3}')
    with pytest.raises(Impossible) as refused:
        comparison.read_promise(tmp_path)
    assert str(tmp_path / "plan.json") in refused.value.what
    assert refused.value.what == snapshot


@pytest.mark.parametrize(
    ("step_s", "tensor_bytes", "said"),
    [
        (
            2.1,
            40.2,
            "memory 40.2 GiB of 40.0 GiB planned (+0.5 %); a step takes 2.1 s, planned 2 s (+5.0 %)",
        ),
        (
            0.5,
            44,
            "memory 44.0 GiB of 40.0 GiB planned (+10.0 %), more than planned: an evaluation or longer "
            "samples may run out of memory; a step takes 500 ms, planned 2 s (-75.0 %)",
        ),
        (
            4.0,
            None,
            "memory is not measured on the CPU; muster plan --verify measures it; a step takes 4 s, "
            "planned 2 s (+100.0 %), slower than planned: the shares in the step line show what it "
            "waits for",
        ),
    ],
)
def test_the_line(step_s: float, tensor_bytes: float | None, said: str) -> None:
    measured = MeasuredRun(
        steps=3,
        step_s=step_s,
        tensor_bytes=None if tensor_bytes is None else int(tensor_bytes * GiB),
    )
    assert comparison_line(PROMISE, measured) == f"plan after step 3: {said}"
