"""``muster bench collectives``: latency and bandwidth between ranks by operation and message size."""

from collections.abc import Callable, Sequence
from typing import Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, amount_text, line_chart
from torchmuster.units import KiB, MiB

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter")
SIZES = (4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB)  # of messages
QUICK_SIZES = (4 * KiB, MiB)
SLOW_S = 1.0  # larger messages of this operation are left out after one that takes longer
SAMPLES = 5
SAMPLE_BYTES = 4 * MiB  # each sample repeats a smaller message up to so much


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`."""
    return {"sizes": QUICK_SIZES if quick else SIZES}


def measure(device: str, sizes: Sequence[int]) -> list[Row]:
    """Time the operations on all ranks, and compare every value that arrives.

    Sizes are bytes of the whole message, as in nccl-tests. A sample is the time of the slowest rank.
    """
    from torchmuster.train.world import join_world

    rows = []
    with join_world("cpu" if device == "cpu" else "auto") as world:
        for operation in OPERATIONS:
            for size in sorted(sizes):
                row = measure_message(operation, size, world)
                rows.append(row)
                if row.median_s > SLOW_S:
                    break
    return rows


def measure_message(operation: str, size: int, world: Any) -> Row:
    """Send messages of one size; called on all ranks.

    Every rank compares its values; the row has the sum of the wrong ones of all ranks. Small messages
    are repeated in a sample.
    """
    import torch
    import torch.distributed as dist

    from torchmuster.bench import timing

    ranks = world.world_size
    elements = max(1, size // 4 // ranks) * ranks
    call, wrong_values = message(operation, elements, world)
    call()
    wrong = torch.tensor(float(wrong_values()), device=world.device)
    dist.all_reduce(wrong)
    timer = timing.timer(call)
    samples = []
    for _ in range(SAMPLES):
        dist.barrier()
        slowest_s = torch.tensor(timer.timeit(max(1, SAMPLE_BYTES // size)).mean)
        slowest_s = slowest_s.to(world.device)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        samples.append(float(slowest_s))
    labels: dict[str, str | int] = {"operation": operation, "bytes": 4 * elements, "ranks": ranks}
    row = Row(labels=labels, seconds=tuple(samples), figures={"wrong_values": float(wrong)})
    row.figures["bus_bytes_s"] = bus_factor(operation, ranks) * 4 * elements / row.median_s
    return row


def message(
    operation: str, elements: int, world: Any
) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return a call of the operation, and a count of the wrong values that it leaves.

    Inputs are not changed, so each call gives the same values.
    """
    import torch
    import torch.distributed as dist

    ranks, rank = world.world_size, world.global_rank
    total = ranks * (ranks + 1) // 2
    whole = torch.zeros(elements, device=world.device)
    part = torch.full((elements // ranks,), rank + 1.0, device=world.device)
    inputs = torch.full((elements,), rank + 1.0, device=world.device)

    def all_reduce() -> None:
        whole.copy_(inputs)
        dist.all_reduce(whole)

    def all_gather() -> None:
        dist.all_gather_into_tensor(whole, part)

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(part, inputs)

    by_rank = torch.arange(1, ranks + 1.0, device=world.device).repeat_interleave(elements // ranks)
    calls: dict[str, tuple[Callable[[], None], torch.Tensor, torch.Tensor]] = {
        "all-reduce": (all_reduce, whole, torch.full_like(whole, total)),
        "all-gather": (all_gather, whole, by_rank),
        "reduce-scatter": (reduce_scatter, part, torch.full_like(part, total)),
    }
    call, result, expected = calls[operation]
    return call, lambda: int((result != expected).sum())


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth / (bytes / time), as nccl-tests defines it.

    Bus bandwidth does not depend on the number of ranks, so it compares with the link's speed.
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if operation == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def summarize(rows: Sequence[Row]) -> Report:
    """Name the largest bandwidth and the smallest latency of an all-reduce.

    All-reduce, because DDP sends gradients with it.
    """
    reduced = [row for row in rows if row.labels["operation"] == "all-reduce"]
    smallest = reduced[0]
    best = max(reduced, key=lambda row: row.figures["bus_bytes_s"])
    enough = next(row for row in reduced if bandwidth(row) >= 0.8 * bandwidth(best))
    conclusion = (
        f"An all-reduce on {smallest.labels['ranks']} ranks reaches "
        f"{amount_text(bandwidth(best), 'B/s')} of bus bandwidth, and takes "
        f"{amount_text(smallest.median_s, 's')} for {size_text(smallest)}."
    )
    advice = (
        f"send messages of at least {size_text(enough)} (DDP: bucket_cap_mb), which reach 80 % of "
        "the largest bandwidth; compare it with your link, and run muster check if it is lower."
    )
    table = show.table(
        "Messages between ranks (bus bandwidth as in nccl-tests)",
        rows,
        show.label("operation"),
        ("size", size_text),
        show.TIME,
        show.amount("bus bandwidth", "bus_bytes_s", "B/s"),
        ("wrong values", lambda row: f"{row.figures['wrong_values']:.0f}"),
    )
    chart = line_chart(
        f"Messages between {rows[0].labels['ranks']} ranks",
        Axis(title="message size", unit="B", log=True),
        Axis(title="bus bandwidth", unit="B/s", log=True),
        show.curves(rows, "operation", "bytes", bandwidth),
    )
    return Report(
        conclusion=conclusion,
        advice=advice,
        tables=[table],
        charts={"collectives": chart},
        findings=[wrong_value(row) for row in rows if row.figures["wrong_values"]],
    )


def bandwidth(row: Row) -> float:
    """Return the bus bandwidth in bytes per second."""
    return row.figures["bus_bytes_s"]


def size_text(row: Row) -> str:
    """Return the size of a message."""
    return amount_text(int(row.labels["bytes"]), "B")


def wrong_value(row: Row) -> Finding:
    """Return the failure of a message with wrong values."""
    return Finding(
        name="collectives-wrong-values",
        status=Status.FAILURE,
        what=f"{row.labels['operation']} of {size_text(row)} left "
        f"{row.figures['wrong_values']:.0f} wrong values",
        why="a link, a GPU or the communication library changes data",
        fix="run muster check; do not train on this host until it passes",
    )
