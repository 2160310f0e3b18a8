r"""Test whether ``muster bench ab`` detects 3 % more work, and reports nothing where nothing changed.

    python benchmarks/bench_compare.py --equal 20 --slowed 5 --pairs 16 --folder /tmp/pairs \
        --out docs/measured/bench-compare.md

Each comparison has N pairs of fresh processes. The two processes of a pair time four operations, interleaved, as in ``muster bench
ab``. On the slowed side one of the four does 3 % more work: its matrices have 3 % more rows. The results come from the command
itself, with all four compared at once. Pairs that are already in the folder are not measured again.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchmuster.bench import record
from torchmuster.bench.ab_run import AbCommand, measure_pairs
from torchmuster.bench.comparison import FLOOR, Comparison, compare_records
from torchmuster.bench.record import records_at
from torchmuster.runfolder import write_atomically

ROWS, SLOWED_ROWS = 400, 412
SLOWED = "linear layers"
ROUNDS, SAMPLE_S, WARM_UP_S = 60, 0.005, 0.1


def measure(path: Path, *, slowed: bool) -> None:
    """Time the four things in this process, and write the record."""
    import torch

    from torchmuster.bench import environment, record
    from torchmuster.bench.probes.clock import interleaved
    from torchmuster.cli.bench import now

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = environment.environment_here("cpu")
    rows = SLOWED_ROWS if slowed else ROWS
    samples = interleaved(
        _things(rows),
        device=torch.device("cpu"),
        rounds=ROUNDS,
        least_sample_s=SAMPLE_S,
        warm_up_s=WARM_UP_S,
    )
    series = tuple(
        record.Series(name=name, unit="s", better="lower", samples=some)
        for name, some in samples.items()
    )
    found = record.BenchRecord(
        bench="bench_compare",
        date=now(),
        settings={"rounds": ROUNDS, "threads": 1},
        environment=before.ended(),
        series=series,
    )
    path.parent.mkdir(parents=True)
    record.write_record(path, found)


def _things(rows: int) -> dict[str, Callable[[], object]]:
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    inputs, square = torch.randn(rows, 256), torch.randn(384, 384)
    long, table = torch.randn(1 << 20), torch.nn.Embedding(5000, 128)
    norm, hidden = torch.nn.LayerNorm(512), torch.randn(512, 512)
    places = torch.randint(5000, (2048,))

    @torch.no_grad()
    def linear() -> object:
        return layers(inputs)

    return {
        SLOWED: linear,
        "product": lambda: square @ square,
        "sum": lambda: long + long,
        "norm and look-up": lambda: (norm(hidden), table(places)),
    }


def compared(folder: Path, *, slowed: bool, pairs: int) -> Comparison:
    """Measure pairs of two interleaved sides; return the result of the comparison."""
    words = (sys.executable, __file__, "--measure")
    one_thread = {"OMP_NUM_THREADS": "1"}
    commands = {
        "before": AbCommand(words, one_thread),
        "after": AbCommand((*words, "--slow") if slowed else words, one_thread),
    }
    measure_pairs(commands, folder, pairs=pairs, say=lambda _: None)
    return compare_records(records_at(folder / "before"), records_at(folder / "after"))


def said(found: Comparison) -> str:
    """Return the reported changes of a comparison in one line."""
    told = [one for one in found.changes if one.verdict in ("better", "worse")]
    words = (f"{one.series.name} {one.verdict} by {one.change:+.1%}" for one in told)
    return ", ".join(words) or "nothing"


def alone(folder: Path) -> list[float]:
    """Return how far two equal processes of neighbouring pairs were apart, series by series: they took no turns."""
    apart = []
    for place in sorted(folder.glob("equal-*")):
        a, b = records_at(place / "before"), records_at(place / "after")
        for one, other in zip(a, b[1:], strict=False):
            for before, after in zip(one.series, other.series, strict=True):
                ratio = statistics.median(after.samples) / statistics.median(before.samples)
                apart.append(abs(ratio - 1))
    return sorted(apart)


def table(folder: Path, found: dict[str, Comparison], *, pairs: int) -> str:
    """Return the document."""
    equal = [one for name, one in found.items() if name.startswith("equal")]
    slowed = [one for name, one in found.items() if name.startswith("slowed")]
    first = records_at(folder / next(iter(found)) / "before")[0]
    return "\n".join([*_lines(first, equal, slowed, alone(folder), pairs), ""])


def _lines(
    first: record.BenchRecord,
    equal: Sequence[Comparison],
    slowed: Sequence[Comparison],
    apart: Sequence[float],
    pairs: int,
) -> Iterator[str]:
    where = first.environment
    quiet = sum(said(one) == "nothing" for one in equal)
    right = [
        one
        for one in slowed
        if [x.series.name for x in one.changes if x.verdict == "worse"] == [SLOWED]
        and not any(x.verdict == "better" for x in one.changes)
    ]
    yield "# `muster bench ab`: detected changes and false alarms"
    yield ""
    yield (
        f"Written by `benchmarks/bench_compare.py` on {first.date[:10]}, on {where.cpu} with {where.cores} cores and torch {where.torch}. Each comparison "
        f"has {pairs} pairs of fresh processes whose samples are interleaved. Each process times four operations on one thread, with {ROUNDS} samples of each."
    )
    yield ""
    yield "| comparisons | correct | reported |"
    yield "|---|---|---|"
    yield f"| {len(equal)} with nothing changed | {quiet} | {_words(equal)} |"
    yield f"| {len(slowed)} with 3 % more work in one of the four | {len(right)} | {_words(slowed)} |"
    yield ""
    seen = sorted(one.would_be_seen(x) for one in equal for x in one.changes)
    yield (
        f"In the comparisons without a change, a change of {statistics.median(seen):.1%} would have been detected in half of the series. "
        f"In the noisiest series, the smallest detectable change is {seen[-1]:.1%}."
    )
    yield ""
    beyond = sum(one > FLOOR for one in apart)
    yield (
        f"It is not enough to compare processes that run one after the other. In {len(apart)} comparisons of two equal processes from neighboring pairs, "
        f"the median difference was {statistics.median(apart):.1%}. One in twenty differed by more than {apart[int(len(apart) * 0.95)]:.1%}, "
        f"and the worst by {apart[-1]:.1%}; {beyond} differed by more than {FLOOR:.0%}."
    )


def _words(found: Sequence[Comparison]) -> str:
    told = [said(one) for one in found]
    return "; ".join(f"{told.count(one)} x {one}" for one in dict.fromkeys(told))


def main() -> None:
    """Measure what is missing, print each verdict, write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--equal", type=int, default=20)
    parser.add_argument("--slowed", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.out / record.FILE, slowed=options.slow)
        return
    names = [f"equal-{number:02}" for number in range(options.equal)]
    names += [f"slowed-{number:02}" for number in range(options.slowed)]
    begun_s, found = time.monotonic(), {}
    for name in names:
        slowed = name.startswith("slowed")
        found[name] = compared(options.folder / name, slowed=slowed, pairs=options.pairs)
        print(f"{name}: {said(found[name])} ({time.monotonic() - begun_s:.0f} s)", flush=True)
    if options.out is None:
        return
    document = table(options.folder, found, pairs=options.pairs)
    write_atomically(options.out, document)
    print(document)


if __name__ == "__main__":
    main()
