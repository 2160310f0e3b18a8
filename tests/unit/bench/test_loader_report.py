"""What a report on reading says of made-up measurements."""

from dataclasses import replace

from syrupy.assertion import SnapshotAssertion

from torchmuster.bench import loader
from torchmuster.bench.environment import Environment
from torchmuster.bench.loader import LoaderAnswer, Read, Reading
from torchmuster.bench.loader_report import MeasuredLoader, loader_report
from torchmuster.bench.report.report import Report, bench_screen
from torchmuster.decision import Decision
from torchmuster.finding import Status

HERE = Environment(
    host="gpu-server",
    system="Linux",
    cpu="a processor",
    cores=2,
    threads=None,
    memory_bytes=None,
    devices=(),
    driver=None,
    torch="2.13",
    python="3.11",
    torchmuster="0",
)


def read(workers: int, rate: float, *, threads: int = 1) -> Read:
    return Read(
        reading=Reading(workers=workers),
        samples_s=(rate,) * 6,
        first_batch_s=(0.5,),
        next_epoch_s=(0.02,),
        busy_cores=1.5,
        busy_threads=threads,
        indices=("i",),
        values=("v",),
    )


READS = [read(0, 50), read(1, 50), read(2, 98), read(4, 196)]
MEASURED = MeasuredLoader(
    data="own:waiting",
    answer=LoaderAnswer(
        rank=0,
        device="cpu",
        samples_per_step=32,
        samples_per_batch=8,
        batch_bytes=4096,
        samples=1000,
        visits=(),
    ),
    ranks=1,
    cores=2,
    needed_samples_s=None,
    by_workers=READS,
    chosen=loader.best_reading(READS),
)


def made(measured: MeasuredLoader) -> Report:
    return loader_report(
        measured,
        where=Decision(value="cpu", reason="no GPU is visible here"),
        environment=HERE,
        settings={},
        date="2026-01-31T12:00:00+00:00",
        took_s=5.0,
    )


def test_the_screen_has_the_rates_the_choice_and_how_short_a_step_may_be(
    snapshot: SnapshotAssertion,
) -> None:
    shown = bench_screen(made(MEASURED), width=100)
    assert "data.workers: 4" in shown
    assert shown == snapshot


def test_without_an_accelerator_pinning_is_unknown(snapshot: SnapshotAssertion) -> None:
    (found,) = [one for one in made(MEASURED).findings if one.name == "data-pinning"]
    assert found.status is Status.NOTE
    assert found == snapshot


def test_with_an_accelerator_both_copies_are_told(snapshot: SnapshotAssertion) -> None:
    answer = replace(MEASURED.answer, to_device_s=(0.002,), pinned_to_device_s=(0.001,))
    (found,) = [
        one for one in made(replace(MEASURED, answer=answer)).findings if one.name == "data-pinning"
    ]
    assert found == snapshot


def test_crowded_threads_are_warned_of_with_what_was_measured_without_them() -> None:
    crowded = [read(0, 50, threads=2), read(2, 60, threads=2)]
    told = made(
        replace(
            MEASURED,
            by_workers=crowded,
            chosen=loader.best_reading(crowded),
            one_thread=(crowded[1], read(2, 110)),
        )
    )
    words = {one.name: one.what for one in told.findings}
    assert "data-threads" in words
    assert "+83 %" in words["data-one-thread"]
