"""What the worker says where another launcher has decided how many ranks there are."""

import pytest
import torch

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve
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
    return resolve(
        flags=[
            Flag(flag=f"--set distributed.{name}", path=f"distributed.{name}", text=text)
            for name, text in values.items()
        ]
    )


def test_several_ranks_are_refused_where_distributed_is_off() -> None:
    with pytest.raises(Impossible) as error:
        check_ranks(given(enabled="false"), TWO)
    assert error.value.what == "distributed.enabled is false, but 2 ranks were started"
    assert error.value.why == "by --set distributed.enabled: false means one process"


def test_another_number_of_gpus_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    check_ranks(given(num_gpus="2"), TWO)
    assert capsys.readouterr().out == ""
    check_ranks(given(num_gpus="4"), TWO)
    assert capsys.readouterr().out == (
        "distributed.num_gpus is 4, but 2 ranks were started on this machine: the launcher decides, "
        "here --nproc-per-node\n"
    )
