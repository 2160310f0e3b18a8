"""``muster bench scaling``: time, throughput and efficiency of training on 1, 2, 4 ranks."""

import contextlib
from collections.abc import Sequence
from typing import Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import Impossible
from torchmuster.pages.charts import Axis, Curve, amount_text, line_chart

EFFICIENT = 0.8  # a larger share of the ideal throughput needs no advice
STEP = "step"
ALONE = "step without exchange"


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`; the ranks of a CPU share its cores equally."""
    if tuple(ranks) == (1,):
        raise Impossible(
            "cannot measure scaling with fewer than 2 ranks",
            why="on GPUs, each rank needs its own",
            fix="muster bench scaling --device cpu --ranks 1,2",
        )
    size = {"batch_size": 2, "samples": 5} if quick else {"batch_size": 8, "samples": 12}
    threads = usable_cores().value // max(ranks) if device == "cpu" else 0
    return {**size, "threads": threads}


def measure(device: str, batch_size: int, threads: int, samples: int) -> list[Row]:
    """Time DDP steps of the small GPT on these ranks, with and without exchanging gradients.

    Each rank has its own batch (weak scaling). The steps without exchange run on all ranks at the
    same time, so they include what the ranks cost each other otherwise: cores, memory, power.
    ``threads`` limits the threads of a rank, so that a rank always has the same compute; 0: no limit.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from torchmuster.bench import small_gpt, timing
    from torchmuster.train.world import join_world

    if threads:
        torch.set_num_threads(threads)
    with join_world("cpu" if device == "cpu" else "auto") as world:
        model = DistributedDataParallel(small_gpt.SmallGpt().to(world.device))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = next(small_gpt.texts(batch_size, seed=world.global_rank)).to(world.device)

        def step(exchange: bool) -> None:
            optimizer.zero_grad()
            with contextlib.nullcontext() if exchange else model.no_sync():
                model(batch).backward()
            optimizer.step()

        timers = {
            STEP: timing.timer(lambda: step(exchange=True)),
            ALONE: timing.timer(lambda: step(exchange=False)),
        }
        seconds: dict[str, tuple[float, ...]] = dict.fromkeys(timers, ())
        for _ in range(samples):
            for name, timer in timers.items():
                dist.barrier()
                slowest_s = torch.tensor(timer.timeit(1).mean, device=world.device)
                dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
                seconds[name] += (float(slowest_s),)
        rows = []
        for name in timers:
            labels: dict[str, str | int] = {
                "ranks": world.world_size,
                "batch_size": batch_size,
                "timed": name,
            }
            rows.append(Row(labels=labels, seconds=seconds[name]))
    return rows


def summarize(rows: Sequence[Row]) -> Report:
    """Compare the throughput on all numbers of ranks with that of the smallest one.

    Speed-up is the ratio of throughputs. Efficiency is speed-up per rank: 100 % if a step takes as long
    as on the smallest number.
    """
    steps = {int(row.labels["ranks"]): row for row in rows if row.labels["timed"] == STEP}
    alone = {int(row.labels["ranks"]): row for row in rows if row.labels["timed"] == ALONE}
    least, most = min(steps), max(steps)
    base = steps[least]
    last = base.median_s / steps[most].median_s  # all ranks have the same batch
    speed_up = throughput(steps[most]) / throughput(base)
    conclusion = (
        f"{most} ranks train the small GPT {speed_up:.2f} times as fast as {least}: "
        f"an efficiency of {last:.0%}."
    )

    def time_alone(row: Row) -> str:
        return amount_text(alone[int(row.labels["ranks"])].median_s, "s")

    table = show.table(
        "DDP, each rank with its own batch (medians of the slowest rank)",
        list(steps.values()),
        show.label("ranks"),
        show.TIME,
        (ALONE, time_alone),
        ("samples", lambda row: f"{throughput(row):.3g}/s"),
        ("speed-up", lambda row: f"{throughput(row) / throughput(base):.2f}"),
        ("efficiency", lambda row: f"{base.median_s / row.median_s:.0%}"),
    )
    per_rank = throughput(base) / least
    measured = [(ranks, throughput(row)) for ranks, row in steps.items()]
    ideal = [(ranks, ranks * per_rank) for ranks in steps]
    chart = line_chart(
        "Small GPT with DDP: throughput by number of ranks",
        Axis(title="ranks", log=True),
        Axis(title="samples per second, all ranks"),
        [Curve(name="measured", points=measured), Curve(name="ideal", points=ideal, dashed=True)],
    )
    return Report(
        conclusion=conclusion,
        advice=advice(steps[most], alone[most], alone[least], last),
        tables=[table],
        charts={"scaling": chart},
    )


def throughput(row: Row) -> float:
    """Return the samples per second of all ranks together."""
    return int(row.labels["ranks"]) * int(row.labels["batch_size"]) / row.median_s


def advice(step: Row, alone: Row, base_alone: Row, share: float) -> str:
    """Name the bottleneck by two differences of measured times.

    Exchange: the step, minus the step without exchange on the same ranks. Computing: the step without
    exchange, minus that on the smallest number of ranks. They are not rescaled, and need not add up
    to the whole loss.
    """
    if share >= EFFICIENT:
        return "use all ranks; there is no bottleneck."
    exchange_s = step.median_s - alone.median_s
    computing_s = alone.median_s - base_alone.median_s
    exchange, computing = amount_text(exchange_s, "s"), amount_text(computing_s, "s")
    if exchange_s >= computing_s:
        return (
            f"the bottleneck is exchanging gradients ({exchange} of a step): use larger batches or "
            "gradient accumulation, and check the link with muster bench collectives."
        )
    return (
        f"the bottleneck is computing: the same step without exchange takes {computing} longer "
        "than on fewer ranks, which share cores or memory bandwidth. Use fewer ranks per host."
    )
