"""What the worker says where another launcher has decided how many ranks there are."""

import pytest
import torch

from torchmuster.train.weights import WeightsNotWritten
from torchmuster.train.world import World
from torchmuster.worker import training
from torchmuster.worker.data import describe_mixed_gpus

pytestmark = pytest.mark.engine

TWO = World(
    global_rank=0,
    local_rank=0,
    node_rank=0,
    world_size=2,
    local_world_size=2,
    device=torch.device("cpu"),
    backend="gloo",
)


def test_final_weights_are_written_again_only_where_there_was_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "RETRY_EVERY_S", 0.0)
    problems = iter(["[Errno 28] No space left on device", "[Errno 5] Input/output error"])
    tries: list[str] = []

    def write() -> dict[str, str]:
        tries.append("")
        if (problem := next(problems, "")) != "":
            raise WeightsNotWritten("cannot write the weights", why=problem)
        return {"weight": "hash"}

    assert training._until_written(write, TWO) == {"weight": "hash"}
    assert len(tries) == 3
    problems = iter(["[Errno 13] Permission denied"])
    with pytest.raises(WeightsNotWritten):
        training._until_written(write, TWO)


def test_mixed_gpus_are_named_by_the_one_with_the_least_memory() -> None:
    gib = 1024**3
    assert describe_mixed_gpus([("L4", 24 * gib), ("L4", 24 * gib)]) is None
    note = describe_mixed_gpus([("H100", 80 * gib), ("T4", 16 * gib), ("H100", 80 * gib)])
    assert note is not None
    assert note.endswith("it must fit the T4 with 16.0 GiB")
