"""What the worker says where another launcher has decided how many ranks there are."""

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.errors import Impossible
from torchmuster.train.weights import WeightsNotWritten
from torchmuster.train.world import World
from torchmuster.worker import training
from torchmuster.worker.__main__ import check_ranks
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


def given(**values: str) -> Resolved:
    return resolve_settings(
        flags=[
            Flag(flag=f"--set distributed.{name}", path=f"distributed.{name}", text=text)
            for name, text in values.items()
        ]
    )


def test_several_ranks_are_refused_where_distributed_is_off(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as error:
        check_ranks(given(enabled="false"), TWO)
    assert "--set distributed.enabled" in error.value.why
    assert error.value == snapshot


def test_another_number_of_gpus_is_told(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    check_ranks(given(num_gpus="2"), TWO)
    assert capsys.readouterr().out == ""
    check_ranks(given(num_gpus="4"), TWO)
    said = capsys.readouterr().out
    assert "distributed.num_gpus is 4" in said
    assert said == snapshot


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
    assert describe_mixed_gpus([("L4", 24 * gib), ("L4", 24 * gib)]) == ""
    note = describe_mixed_gpus([("H100", 80 * gib), ("T4", 16 * gib), ("H100", 80 * gib)])
    assert "all use the same micro-batch size" in note
    assert note.endswith("it must fit the T4 with 16.0 GiB")
