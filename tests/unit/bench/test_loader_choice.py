"""Which way to read is best, and what is wrong with reading: by made-up measurements."""

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench import loader
from torchmuster.bench.loader import (
    LoaderAnswer,
    Read,
    Reading,
    Visit,
    join_loader_answers,
    readings_for,
)
from torchmuster.finding import Status


def read(
    workers: int,
    rate: float,
    *,
    threads: int | None = 1,
    values: tuple[str, ...] = ("same",),
    indices: tuple[str, ...] = ("same",),
) -> Read:
    return Read(
        reading=Reading(workers=workers),
        samples_s=(rate,) * 6,
        first_batch_s=(0.1,),
        next_epoch_s=(0.01,),
        busy_cores=float(workers),
        busy_threads=threads,
        indices=indices,
        values=values,
    )


def test_the_fastest_number_of_workers_is_taken_and_the_others_are_named(
    snapshot: SnapshotAssertion,
) -> None:
    decided = loader.best_reading([read(0, 50), read(1, 49), read(2, 98), read(4, 196)])
    assert decided.value.reading.workers == 4
    assert decided.reason == snapshot


def test_of_numbers_that_are_as_fast_the_smallest_is_taken(snapshot: SnapshotAssertion) -> None:
    decided = loader.best_reading([read(0, 50), read(2, 97), read(4, 100), read(8, 99)])
    assert decided.value.reading.workers == 2
    assert decided.reason == snapshot


def test_workers_that_are_slower_than_none_are_not_taken() -> None:
    assert loader.best_reading([read(0, 900), read(1, 300)]).value.reading.workers == 0


def test_the_fewest_that_feed_what_is_needed_are_enough() -> None:
    reads = [read(0, 50), read(2, 98), read(4, 196)]
    decided = loader.best_reading(reads, needed_samples_s=80)
    assert (decided.value.reading.workers, decided.reason) == (2, "98 samples/s; 80 are needed")
    # With less than a tenth to spare a bad moment would be waited for.
    assert loader.best_reading(reads, needed_samples_s=95).value.reading.workers == 4


def test_where_nothing_feeds_enough_the_fastest_is_taken_and_it_is_a_failure(
    snapshot: SnapshotAssertion,
) -> None:
    reads = [read(0, 50), read(2, 98)]
    decided = loader.best_reading(reads, needed_samples_s=196)
    assert decided.value.reading.workers == 2
    assert decided.reason == snapshot
    found = loader.feeding(decided.value, samples_per_step=8, needed_samples_s=196)
    assert found.status is Status.FAILURE
    assert "50 %" in found.what
    assert found == snapshot


def test_what_is_within_the_noise_of_the_fastest_is_as_fast() -> None:
    noisy = replace(read(4, 100), samples_s=(80, 85, 100, 105, 120, 130))
    assert loader.best_reading([read(2, 90), noisy]).value.reading.workers == 2
    assert loader.best_reading([read(2, 70), noisy]).value.reading.workers == 4


def test_how_short_a_step_may_be_is_said(snapshot: SnapshotAssertion) -> None:
    found = loader.feeding(read(4, 830), samples_per_step=32, needed_samples_s=None)
    assert found.status is Status.OK
    assert "39 ms" in found.what
    assert found == snapshot


def test_more_workers_are_proposed_only_where_the_last_ones_still_gave_much() -> None:
    growing = [read(2, 98), read(4, 196)]
    found = loader.more_might_help(growing, growing[1])
    assert found is not None
    assert found.fix.startswith("muster bench data --workers 4 8 16")
    flat = [read(2, 98), read(4, 110)]
    assert loader.more_might_help(flat, flat[1]) is None
    assert loader.more_might_help(growing, growing[0]) is None


@pytest.mark.parametrize(
    ("reads", "status", "words"),
    [
        ([read(0, 1), read(2, 1)], Status.OK, "bit for bit"),
        (
            [read(0, 1, values=("a",)), read(1, 1, values=("b",)), read(2, 1, values=("b",))],
            Status.NOTE,
            "differ between 0 workers and 1 or more",
        ),
        (
            [read(1, 1, values=("a", "b")), read(2, 1, values=("c",))],
            Status.WARNING,
            "different content each time",
        ),
        (
            [read(0, 1, indices=("a",)), read(2, 1, indices=("b",))],
            Status.FAILURE,
            "the sample order depends",
        ),
    ],
)
def test_what_was_read_is_compared(reads: list[Read], status: Status, words: str) -> None:
    found = loader.same_data(reads)
    assert found.status is status
    assert words in found.what


def test_workers_with_more_threads_than_there_are_cores_are_found(
    snapshot: SnapshotAssertion,
) -> None:
    reads = [read(0, 50, threads=4), read(1, 80, threads=4), read(2, 60, threads=4)]
    found = loader.oversubscription(reads, cores=4, ranks=1)
    assert found is not None
    assert found.status is Status.WARNING
    assert "OMP_NUM_THREADS=1" in found.fix
    assert "torch.set_num_threads(1)" in found.fix
    assert found == snapshot
    # All ranks of a machine share its cores.
    assert loader.oversubscription(reads[:2], cores=4, ranks=1) is None
    assert loader.oversubscription(reads[:2], cores=4, ranks=2) is not None


@pytest.mark.parametrize("threads", [None, 1])
def test_workers_with_one_thread_each_are_never_too_many_threads(threads: int | None) -> None:
    assert loader.oversubscription([read(8, 50, threads=threads)], cores=2, ranks=1) is None


def test_what_one_thread_gained_is_told_as_measured(snapshot: SnapshotAssertion) -> None:
    helped = loader.one_thread_gain(read(2, 60), read(2, 120))
    assert "+100 %" in helped.what
    assert helped == snapshot
    assert loader.one_thread_gain(read(2, 60), read(2, 61)) == snapshot


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"),
    [
        (2, 1, [0, 1, 2, 4]),
        (1, 1, [0, 1, 2]),
        (12, 1, [0, 1, 2, 4, 8, 12, 16, 24]),
        (64, 8, [0, 1, 2, 4, 8, 16]),
        (4, 8, [0, 1, 2]),
    ],
)
def test_numbers_of_workers_go_up_to_twice_a_ranks_cores(
    cores: int, ranks: int, workers: list[int]
) -> None:
    assert [one.workers for one in readings_for(cores, ranks)] == workers


def visit(workers: int, rate: float, *, values: str = "v") -> Visit:
    return Visit(
        reading=Reading(workers=workers),
        first_batch_s=0.2,
        next_epoch_s=0.1,
        samples_s=(rate, rate),
        busy_cores=1.0,
        busy_threads=1,
        indices="i",
        values=values,
    )


def answer(rank: int, *visits: Visit) -> LoaderAnswer:
    return LoaderAnswer(
        rank=rank,
        device="cpu",
        samples_per_step=4,
        samples_per_batch=4,
        batch_bytes=100,
        samples=100,
        visits=visits,
    )


def test_the_slowest_rank_counts_and_each_rank_may_have_its_own_samples() -> None:
    first = answer(0, visit(0, 100, values="a"), visit(0, 102, values="a"))
    second = answer(1, visit(0, 50, values="b"), visit(0, 52, values="b"))
    (found,) = join_loader_answers([first, second])
    assert found.rate.median == 51
    assert found.values == ("a b",)
    assert found.busy_cores == 2.0
