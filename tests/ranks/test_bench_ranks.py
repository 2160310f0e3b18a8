"""``muster bench collectives`` and ``scaling`` on real ranks: values, times, and the whole way of the command."""

import json
from pathlib import Path

import pytest

from muster_command import Muster
from rank_group import RunRanks
from rank_programs import timing
from torchmuster.bench import collectives, record, scaling
from torchmuster.bench.bandwidth import OPERATIONS

pytestmark = pytest.mark.ranks


@pytest.mark.nightly
def test_every_value_of_every_kind_of_message_is_compared(run_ranks: RunRanks) -> None:
    answers = run_ranks(timing.messages, 3, False)
    measured = collectives.join_rank_times(answers)
    assert measured.wrong == ()
    assert list(measured.times) == list(OPERATIONS)
    for operation, by_size in measured.times.items():
        assert list(by_size) == [96, 4992]  # what three ranks can share
        assert all(len(samples) == 3 and min(samples) > 0 for samples in by_size.values()), (
            operation
        )
    # Each message twice: a reduce-scatter leaves a third of its size on each rank.
    for one in answers:
        for timed in one.timed:
            share = 3 if timed.operation == "reduce-scatter" else 1
            assert timed.compared == 2 * timed.size_bytes // 4 // share


@pytest.mark.nightly
def test_one_wrong_value_is_found_with_its_rank(run_ranks: RunRanks) -> None:
    measured = collectives.join_rank_times(run_ranks(timing.messages, 2, True))
    assert {one.rank for one in measured.wrong} == {1}
    assert {one.operation for one in measured.wrong} == {"all-reduce"}
    assert [one.wrong for one in measured.wrong] == [2, 2]


@pytest.mark.nightly
@pytest.mark.alone
def test_a_rank_that_is_slow_is_waited_for_and_not_called_communication(
    run_ranks: RunRanks,
) -> None:
    both = scaling.join_scaling_times([run_ranks(timing.steps, 2, "ddp", "quick_data")])
    taken = both.by_portion[2]
    assert both.sent_bytes == 4 * 10
    assert min(taken.step_s) >= timing.SLEEP_S
    assert min(taken.alone_slowest_s) >= timing.SLEEP_S
    imbalance_s = min(
        slowest - mean for slowest, mean in zip(taken.alone_slowest_s, taken.alone_s, strict=True)
    )
    assert imbalance_s > timing.SLEEP_S / 4  # of two ranks one has nearly nothing to do


@pytest.mark.nightly
def test_reading_is_timed_inside_of_the_step(run_ranks: RunRanks) -> None:
    both = scaling.join_scaling_times([run_ranks(timing.steps, 2, "fsdp", "slow_data")])
    taken = both.by_portion[2]
    assert taken.read_s >= 2 * timing.SLEEP_S / 4
    assert min(taken.alone_s) >= 2 * timing.SLEEP_S / 4
    assert both.sent_bytes == 4 * 10


def test_collectives_from_the_command_to_the_record(muster: Muster, own_machine: Path) -> None:
    done = muster(
        *("bench", "collectives", "--device", "cpu", "--quick", "--rounds", "3", "--largest"),
        *("16KiB", "--operations", "all-reduce,send-receive", "--out", "kept"),
    )
    assert done.code == 0, done.err
    assert "all values correct" in done.out
    assert "send-receive: " in done.out
    kept = record.read_record(own_machine / "kept" / "record.json")
    assert kept.settings["ranks"] == 2
    assert len(kept.series) == 2 * 3
    assert set(kept.facts["lines"]) == {"all-reduce", "send-receive"}
    assert (own_machine / "kept" / "bus-bandwidth-by-size.svg").is_file()


def test_scaling_from_the_command_to_the_record(muster: Muster, own_machine: Path) -> None:
    done = muster(
        *("bench", "scaling", "--device", "cpu", "--quick", "--rounds", "2", "--ranks", "1,2"),
        *("--batch-size", "2", "--json", "--out", "kept"),
    )
    assert done.code == 0, done.err
    said = json.loads(done.out)
    names = {one["name"] for one in said["findings"]}
    assert {"strong-scaling", "weak-scaling", "outlook"} <= names
    kept = record.read_record(own_machine / "kept" / "record.json")
    for parts in kept.facts["parts_s"].values():
        assert min(parts.values()) >= 0
    series = {(one.name, *one.labels.items()) for one in kept.series}
    assert ("step", ("ranks", 2), ("samples_of_a_rank", 1)) in series
    assert ("step, nothing sent", ("ranks", 2), ("samples_of_a_rank", 2)) in series
