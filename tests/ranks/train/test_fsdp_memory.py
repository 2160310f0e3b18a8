"""FSDP takes the memory that it should, and so trains what one rank has no room for."""

import os
import re

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import memory
from torchmuster.units import MiB

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


@pytest.mark.nightly
def test_running_out_while_blocks_are_gathered_shows_the_shards(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    # In the last block but one: itself, or all up to it.
    for kind in ("full_shard", "shard_grad_op"):
        for of_rank in run_ranks(memory.running_out, 2, kind):
            for phase in ("forward", "backward"):
                said = of_rank[phase]
                headline, *lines = said.splitlines()
                assert f" {phase} pass, " in headline
                assert headline.endswith(" 1.5 GiB")
                assert re.sub(r"rank \d on \S+", "rank R on HOST", headline) == snapshot(name=phase)
                assert "parameters                    3.0 MiB" in lines
                shares = [line for line in lines if line.startswith("more ranks: ")]
                assert [re.sub(r"[\d.]+ \w?i?B\b", "SIZE", line) for line in shares] == snapshot(
                    name="more ranks"
                )
                assert "distributed.strategy" not in said


@pytest.mark.nightly
def test_what_one_rank_has_no_room_for_is_trained_by_four(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    # 16 blocks of 4 MiB: 64 MiB of parameters, 256 MiB with gradients and Adam's averages.
    limit = 200 * MiB
    (alone,) = run_ranks(memory.train_within, 1, limit, 1024, 16, False)
    first, *lines = alone.splitlines()
    assert first.startswith(f"rank 0 on {os.uname().nodename} (cpu) ")
    assert first.endswith(" 4.0 MiB")
    assert "parameters                   64.0 MiB" in lines
    (advice,) = [line for line in lines if "fsdp" in line]
    assert re.sub(r"[\d.]+ \w?i?B\b", "SIZE", advice) == snapshot
    together = run_ranks(memory.train_within, 4, limit, 1024, 16, True)
    assert together == ["trained"] * 4
