"""What the worker reports before training."""

import pytest

from torchmuster.worker.data import describe_mixed_gpus

pytestmark = pytest.mark.engine


def test_mixed_gpus_are_named_by_the_one_with_the_least_memory() -> None:
    gib = 1024**3
    assert describe_mixed_gpus([("L4", 24 * gib), ("L4", 24 * gib)]) is None
    note = describe_mixed_gpus([("H100", 80 * gib), ("T4", 16 * gib), ("H100", 80 * gib)])
    assert note is not None
    assert note.endswith("it must fit the T4 with 16.0 GiB")
