"""What the worker says where another launcher has decided how many ranks there are."""

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.errors import Impossible
from torchmuster.train.world import World
from torchmuster.worker.__main__ import check_ranks

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
