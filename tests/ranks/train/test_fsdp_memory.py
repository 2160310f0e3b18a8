"""FSDP takes the memory that it should, and so trains what one rank has no room for."""

import pytest

from rank_group import RunRanks
from rank_programs import memory

pytestmark = pytest.mark.ranks


BLOCK = 4 * memory.WIDTH**2
WHOLE = memory.BLOCKS * BLOCK


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_keeps_its_share_and_has_one_block_whole(run_ranks: RunRanks, ranks: int) -> None:
    share = WHOLE / ranks
    for rank, found in enumerate(run_ranks(memory.train_sharded, ranks, "full_shard")):
        # All shards, and two whole parameters: torch's set_model_state_dict allocates the next one before it
        # frees the last, and a thread of gloo may have one more in hand. Rank 0 has built the whole model.
        whole = WHOLE if rank == 0 else 3 * BLOCK
        assert found["values_peak"] < 1.02 * (whole + share)
        # Parameters and Adam's two averages.
        assert found["kept"] == pytest.approx(3 * share, rel=0.02)
        # And gradients. Towards the end of the backward four things of a block's size are there: the block
        # that is computed, its whole gradient, the block that is gathered ahead, and the gradient of the
        # block before, which is being sent. A thread of gloo that waits for its turn may have one more in hand.
        most = 4 * share + 4 * BLOCK
        assert 0.97 * most < found["step_peak"] < 1.03 * most + BLOCK
        assert found["parameters"] == found["gradients"] == share
        assert found["optimizer"] == 2 * share + 4 * memory.BLOCKS
