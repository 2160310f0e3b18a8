"""The search for the largest micro-batch: right from any first guess, few trials, and what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.plan.proof.trials import (
    RankTrial,
    Trial,
    find_largest_batch,
    largest_expected,
    trial_verdict,
)
from torchmuster.units import GiB


class Machine:
    """Fits micro-batches up to a size."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.tried: list[int] = []

    def __call__(self, micro_batch_size: int) -> Trial:
        assert micro_batch_size not in self.tried
        self.tried.append(micro_batch_size)
        fits = micro_batch_size <= self.largest
        peak = micro_batch_size * GiB
        told = RankTrial(rank=1, ran_out=not fits, peak_bytes=peak, limit_bytes=10 * GiB)
        return Trial(micro_batch_size=micro_batch_size, fits=fits, ranks=(told,))


@given(
    largest=st.integers(0, 300),
    start=st.integers(1, 400),
    most=st.none() | st.integers(1, 350),
)
def test_it_finds_the_largest_from_any_guess(largest: int, start: int, most: int | None) -> None:
    machine = Machine(largest)
    found = find_largest_batch(machine, start=start, most=most).value
    allowed = {1, 2, 4, 8, 16, 32, 64, 128, 256, start, most or 1}
    right = max((one for one in allowed if one <= min(largest, most or 300)), default=None)
    assert found.micro_batch_size == right
    assert machine.tried[0] == min(start, most or start)
    assert len(machine.tried) <= 11
    assert max(machine.tried) <= (most or 512)
    expected = largest_expected(lambda size: size <= largest, start=start, most=most)
    assert expected == (right or 1)


def test_a_right_plan_takes_two_trials(snapshot: SnapshotAssertion) -> None:
    machine = Machine(7)
    found = find_largest_batch(machine, start=6)
    assert machine.tried == [6, 8]
    assert found.reason == snapshot


def test_powers_of_two_are_tried_beside_it(snapshot: SnapshotAssertion) -> None:
    machine = Machine(11)
    found = find_largest_batch(machine, start=32)
    assert machine.tried == [32, 16, 8]
    assert found.value.micro_batch_size == 8
    assert found.reason == snapshot


def test_all_that_a_step_has_is_tried_at_once() -> None:
    machine = Machine(100)
    assert find_largest_batch(machine, start=4, most=12).value.micro_batch_size == 12
    assert machine.tried == [4, 8, 12]


def test_a_step_may_have_no_more_samples(snapshot: SnapshotAssertion) -> None:
    found = find_largest_batch(Machine(100), start=8, most=8)
    assert found.value.micro_batch_size == 8
    assert found.reason == snapshot


def test_not_even_one_sample(snapshot: SnapshotAssertion) -> None:
    found = find_largest_batch(Machine(0), start=4)
    assert found.value.micro_batch_size is None
    assert found.reason == snapshot


def test_a_size_below_one_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as refused:
        find_largest_batch(Machine(1), start=0)
    assert refused.value == snapshot


WELL = RankTrial(rank=0, ran_out=False, peak_bytes=1, limit_bytes=2)
OUT = RankTrial(rank=1, ran_out=True, limit_bytes=GiB)


def trouble(words: str) -> Finding:
    return Finding(name="rank-failed", status=Status.FAILURE, what="rank 1 failed", why=words)


def test_one_rank_that_ran_out_decides_for_all(snapshot: SnapshotAssertion) -> None:
    trial = trial_verdict(4, [WELL, OUT], trouble("exit code 1"), ranks=2)
    assert not trial.fits
    assert "rank 1" in str(trial)
    assert str(trial) == snapshot
    assert trial_verdict(4, [WELL, WELL], None, ranks=2).fits


def test_a_rank_that_the_kernel_killed_ran_out(snapshot: SnapshotAssertion) -> None:
    killed = trouble("the kernel killed it: out of memory")
    trial = trial_verdict(4, [], killed, ranks=2)
    assert not trial.fits
    assert str(trial) == snapshot


def test_other_failures_and_silence_are_no_verdict(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(MusterError) as failed:
        trial_verdict(4, [WELL], trouble("ValueError: no"), ranks=2)
    assert failed.value.why == "rank 1 failed\nValueError: no"
    with pytest.raises(MusterError) as silent:
        trial_verdict(4, [WELL], None, ranks=2)
    assert silent.value == snapshot
