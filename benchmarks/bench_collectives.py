"""Compare bus bandwidths of ``muster bench collectives`` with a hand-written loop, on the same ranks, interleaved.

    python benchmarks/bench_collectives.py --ranks 2 4 --out docs/measured/bench-collectives.md

For each message, the probe of the bench takes one sample and then a plain loop does (or in the opposite order), ``--repeats`` times: a
barrier, N calls, the time divided by N, the maximum over the ranks. The loop shares no code with the probe: it has its own tensors, calls
and factors. The speed of the machine changes all the time, so each sample is compared with its neighbour: the difference is the median
over all repeats. The loop takes a second sample each time: its difference from itself is the best accuracy that can be expected. Run
nothing else at the same time.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

KIB = 1024
CALLS = {16 * KIB: 100, 256 * KIB: 40, 1024 * KIB: 20, 8192 * KIB: 4}  # by size: some 20 ms
BAR = 0.10


def by_hand(call: Callable[[], object], calls: int) -> float:
    """Return seconds per call, of the slowest rank."""
    for _ in range(2):
        call()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor([(time.perf_counter() - begun) / calls], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def calls(count: int, ranks: int, rank: int) -> dict[str, Callable[[], object]]:
    """Return the calls on tensors of so many floats."""
    whole, other, part = torch.rand(count), torch.rand(count), torch.rand(count // ranks)
    sums = torch.zeros(count) + 0.0

    to_the_right = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
    from_the_left = dist.P2POp(dist.irecv, other, (rank + ranks - 1) % ranks)

    def ring() -> None:
        # As pipelines do it; isend and irecv without the batch take a sixth less time at 16 KiB.
        sent, got = dist.batch_isend_irecv([to_the_right, from_the_left])
        sent.wait()
        got.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(sums),
        "all-gather": lambda: dist.all_gather_single(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "send-receive": ring,
    }


def bus(kind: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth by nccl-tests' PERFORMANCE.md, bytes a second."""
    factor = {"all-reduce": 2 * (ranks - 1) / ranks, "send-receive": 1.0}
    return size / seconds * factor.get(kind, (ranks - 1) / ranks)


def rank_program(repeats: int, answers: str) -> None:
    """Measure in both ways, in turns; each rank leaves what it saw."""
    import msgspec

    from torchmuster.bench.bandwidth import OPERATIONS
    from torchmuster.bench.collectives import CollectivesRequest
    from torchmuster.bench.probes import collectives
    from torchmuster.train.world import join_world

    torch.set_num_threads(1)
    with join_world("cpu") as world:
        ours, hand, again = [], [], []
        for size, kind in itertools.product(CALLS, OPERATIONS):
            asked = CollectivesRequest(
                operations=(kind,), sizes_bytes=(size,), rounds=1, device="cpu"
            )
            call = calls(size // 4, world.world_size, world.global_rank)[kind]
            for number in range(repeats):
                for turn in (0, 1) if number % 2 else (1, 0):
                    if turn:
                        ours.append(collectives.times(asked, world))
                    else:
                        hand.append((kind, size, by_hand(call, CALLS[size])))
                again.append((kind, size, by_hand(call, CALLS[size])))
        text = msgspec.json.encode({"ours": ours, "hand": hand, "again": again})
        Path(answers, f"rank-{world.global_rank}.json").write_bytes(text)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A message: bus bandwidths by the product and by hand, and by which share the product's is more."""

    kind: str
    size: int
    product: float
    hand: float
    apart: float
    from_itself: float  # the loop by hand, held against its second sample


def apart(a_s: Sequence[float], b_s: Sequence[float]) -> float:
    """Return by which share ``b`` is faster: the median over pairs of samples."""
    return statistics.median(one / other for one, other in zip(a_s, b_s, strict=True)) - 1


def measured(ranks: int, repeats: int) -> list[Row]:
    """Measure all messages on so many ranks."""
    import msgspec

    from torchmuster.bench import collectives
    from torchmuster.bench.bandwidth import bus_bytes_s

    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", __file__, "--as-rank", folder),
            *("--repeats", str(repeats)),
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seen = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    ours: dict[tuple[str, int], list[float]] = {}
    for number in range(len(seen[0]["ours"])):
        answers = [
            msgspec.convert(one["ours"][number], collectives.CollectiveTimes, strict=False)
            for one in seen
        ]
        for kind, by_size in collectives.join_rank_times(answers).times.items():
            for size, samples in by_size.items():
                ours.setdefault((kind, size), []).extend(samples)
    rows = []
    for (kind, size), product in ours.items():
        hand, again = (
            [seconds for *message, seconds in seen[0][which] if message == [kind, size]]
            for which in ("hand", "again")
        )
        rows.append(
            Row(
                kind=kind,
                size=size,
                product=bus_bytes_s(kind, size, statistics.median(product), ranks),
                hand=bus(kind, size, statistics.median(hand), ranks),
                apart=apart(hand, product),
                from_itself=apart(hand, again),
            )
        )
    return rows


def page(rows: dict[int, list[Row]], repeats: int, words: str) -> str:
    """Return what was measured, as Markdown."""
    errors = [abs(one.apart) for many in rows.values() for one in many]
    own = [abs(one.from_itself) for many in rows.values() for one in many]
    lines = [
        "# `muster bench collectives` compared with a hand-written loop",
        "",
        "Written by",
        "",
        f"    {words}",
        "",
        f"Measured on {date.today()} on {platform.machine()} with {os.cpu_count()} cores and gloo. The bandwidths are medians of {repeats} "
        "samples, interleaved on the same ranks. The difference is the median over pairs of samples.",
        "",
        f"The bench and the loop differ by at most {BAR:.0%} for {_summary(errors)}. The loop and its own second sample differ by "
        f"at most {BAR:.0%} for {_summary(own)}.",
        "",
        "| ranks | message | size | bus bandwidth, bench | loop | difference | loop and its second sample |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, many in rows.items():
        for one in many:
            lines.append(
                f"| {ranks} | {one.kind} | {one.size // KIB} KiB | {one.product / 1e6:.0f} MB/s | {one.hand / 1e6:.0f} MB/s | "
                f"{one.apart:+.1%} | {one.from_itself:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def _summary(errors: Sequence[float]) -> str:
    within = sum(one <= BAR for one in errors)
    return (
        f"**{within} of {len(errors)}** messages (median difference {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%})"
    )


def main() -> None:
    """Measure with each number of ranks, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_program(options.repeats, options.as_rank)
        return
    rows = {ranks: measured(ranks, options.repeats) for ranks in options.ranks}
    text = page(rows, options.repeats, "python " + " ".join(sys.argv))
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
