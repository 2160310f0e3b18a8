"""Records of benches that never ran."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchmuster.bench import record
from torchmuster.bench.environment import Environment
from torchmuster.bench.record import BenchRecord, Series

ENVIRONMENT = Environment(
    host="gpu-server",
    system="Linux 6.1",
    cpu="a processor",
    cores=8,
    threads=None,
    memory_bytes=64 * 1024**3,
    devices=(),
    driver=None,
    torch="2.13.0",
    python="3.11.2",
    torchmuster="0.1.0",
    busy_before_cores=0.1,
    busy_after_cores=0.1,
)


def made_up(
    samples: Mapping[str, Sequence[float]], *, minute: int = 0, bench: str = "matmul"
) -> BenchRecord:
    """Return a record with these times in seconds, by the name of their series."""
    return BenchRecord(
        bench=bench,
        date=f"2026-01-31T12:{minute:02}:00+00:00",
        settings={"sizes": [128]},
        environment=ENVIRONMENT,
        series=tuple(
            Series(name=name, unit="s", better="lower", samples=tuple(some))
            for name, some in samples.items()
        ),
    )


def elsewhere(one: BenchRecord, **changed: object) -> BenchRecord:
    """Return a record as if its environment had been another."""
    return replace(one, environment=replace(one.environment, **changed))  # type: ignore[arg-type]


def keep(folder: Path, records: Sequence[BenchRecord]) -> Path:
    """Write records side by side into a folder."""
    for number, one in enumerate(records):
        (folder / str(number)).mkdir(parents=True)
        record.write_record(folder / str(number) / record.FILE, one)
    return folder
