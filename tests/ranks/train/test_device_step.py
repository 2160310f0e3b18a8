"""Whether a step is applied is decided on the devices: no host reads it, and all ranks do the same."""

import pytest

from rank_group import RunRanks
from rank_programs import device_step

pytestmark = pytest.mark.ranks


# With one rank and with four the same code decides as with two.
TWO_RANKS = [("ddp", 2), ("fsdp", 2)]
REST = [
    pytest.param("single", 1, marks=pytest.mark.nightly),
    pytest.param("hybrid", 4, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "ranks"), [*TWO_RANKS, *REST])
def test_the_host_reads_nothing_between_two_lines(
    run_ranks: RunRanks, name: str, ranks: int
) -> None:
    for found in run_ranks(device_step.reads, ranks, name, "adamw"):
        assert len(found) == 12
        assert not any(found.values()), found


def test_the_reads_of_other_optimizers_are_seen(run_ranks: RunRanks) -> None:
    for optimizer in ("sgd", "not fused"):
        (found,) = run_ranks(device_step.reads, 1, "single", optimizer)
        assert all(found.values())


def test_the_fate_of_a_step_is_read_one_step_later(run_ranks: RunRanks) -> None:
    for copies in run_ranks(device_step.copies, 2, "fsdp"):
        assert copies[:-1] == [(step, step + 1) for step in range(1, device_step.STEPS)]


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("name", "ranks"), [*TWO_RANKS, *REST])
def test_a_step_that_is_not_finite_changes_nothing_at_all(
    run_ranks: RunRanks, name: str, ranks: int, optimizer: str, bad: int
) -> None:
    for clip_norm in (None, 0.05):
        plain = device_step.plain_weights(optimizer, clip_norm, bad)
        for weights in run_ranks(
            device_step.with_a_bad_step, ranks, name, optimizer, clip_norm, bad
        ):
            assert weights == pytest.approx(plain, abs=1e-6)
