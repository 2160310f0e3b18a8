"""Who takes part: read from the launcher, or one process alone."""

import pytest
import torch
import torch.distributed as dist

from torchmuster.train.world import join_world, most_exact, most_exact_type

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(variable, raising=False)


def test_one_process_without_a_launcher_is_a_group_of_one_that_ends() -> None:
    with join_world("cpu") as world:
        assert (world.global_rank, world.local_rank, world.world_size) == (0, 0, 1)
        assert world.is_first
        assert world.device == torch.device("cpu")
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_a_group_that_was_there_is_taken_and_left_as_it_was() -> None:
    with join_world("cpu"):
        with join_world("cpu") as world:
            assert world.world_size == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_sums_are_as_exact_as_the_device_can() -> None:
    assert most_exact_type(torch.device("cpu")) == torch.float64
    assert most_exact_type(torch.device("mps")) == torch.float32
    assert most_exact(torch.ones(2)).dtype == torch.float64
