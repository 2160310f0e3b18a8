"""``muster bench matmul``: the speed of square matrix products by size and dtype, GPU against CPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row, quartiles
from torchmuster.errors import Impossible
from torchmuster.pages.charts import Axis, line_chart

if TYPE_CHECKING:
    import torch

SIZES = (128, 256, 512, 1024, 2048, 4096)
QUICK_SIZES = (128, 256, 512, 1024)
# Relative errors that rounding explains, with float64 as the reference.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
SLOW_S = 0.5  # larger products of this dtype are left out after one that takes longer
CHECKED_ROWS = 8


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`."""
    if quick:
        return {"sizes": QUICK_SIZES, "seconds": 0.1}
    return {"sizes": SIZES, "seconds": 0.4}


def measure(device: str, sizes: Sequence[int], seconds: float = 0.4) -> list[Row]:
    """Multiply matrices on the device, and on the CPU if the device is a GPU.

    ``seconds`` is the measuring time for each product. Sizes are rows and columns. A dtype ends at
    the first size whose product takes longer than ``SLOW_S``, because larger ones take 8 times as
    long for each doubling.
    """
    from torchmuster.bench import timing  # imports torch, which the command does without

    devices = [timing.device_for(device)]
    if devices[0].type != "cpu":
        devices.append(timing.CPU)
    rows = []
    for place in devices:
        dtypes = ["float32", "bfloat16"]
        if place.type != "cpu":
            dtypes.append("float16")
        for dtype in dtypes:
            for size in sorted(sizes):
                row = measure_product(place, dtype, size, seconds)
                rows.append(row)
                if row.median_s > SLOW_S:
                    break
    return rows


def measure_product(device: "torch.device", dtype: str, size: int, seconds: float) -> Row:
    """Time the product of two random squares, and compare some rows of it with float64.

    The reference is computed on the CPU from the same, already rounded, inputs, so that the error is
    that of the product alone: about 3e-7 in float32 and 2e-3 in bfloat16.
    """
    import torch

    from torchmuster.bench import timing

    generator = torch.Generator().manual_seed(size)
    left, right = torch.randn(2, size, size, generator=generator).to(device, getattr(torch, dtype))
    exact = left[:CHECKED_ROWS].cpu().double() @ right.cpu().double()
    error = timing.relative_error((left @ right)[:CHECKED_ROWS], exact)
    samples = timing.time_calls({"product": lambda: left @ right}, seconds)["product"]
    labels: dict[str, str | int] = {"device": device.type, "dtype": dtype, "size": size}
    return Row(labels=labels, seconds=samples, figures={"error": error})


def benchmark_matmul(
    device: "str | torch.device", size: int, iterations: int = 100
) -> dict[str, Any]:
    """Multiply two square float32 matrices; see ``torchmuster.benchmark_matmul``."""
    import torch

    from torchmuster.bench import timing

    if size < 1 or iterations < 1:
        raise Impossible(
            f"benchmark_matmul: invalid size {size} or iterations {iterations}",
            why="both must be at least 1",
            fix='benchmark_matmul("cpu", 1024, 100)',
        )
    left, right = torch.randn(2, size, size).to(device)
    timer = timing.timer(lambda: left @ right)
    samples = tuple(timer.timeit(1).mean for _ in range(iterations))  # each warms up first
    row = Row(labels={"size": size}, seconds=samples)
    low, median, high = quartiles(row.seconds)
    return {
        "device": str(torch.device(device)),
        "size": size,
        "iterations": iterations,
        "seconds": median,
        "tflops": tflops(row),
        "noise": (high - low) / 2 / median,
    }


def tflops(row: Row) -> float:
    """Return the rate of a product in TFLOPS (10^12 operations per second).

    A product of two squares has size^3 multiplications and as many additions.
    """
    return 2 * int(row.labels["size"]) ** 3 / row.median_s / 1e12


def summarize(rows: Sequence[Row]) -> Report:
    """Compare devices and dtypes by size.

    With a GPU the plot is its speed-up over the CPU, for the products that both have measured;
    without one it is the rate.
    """
    gpu_rows = [row for row in rows if row.labels["device"] != "cpu"]
    cpu_rows = [row for row in rows if row.labels["device"] == "cpu"]
    main_rows = gpu_rows or cpu_rows
    best = max(main_rows, key=tflops)
    conclusion = f"The fastest products here: {tflops(best):.3g} TFLOPS ({case(best)})."
    y, value = Axis(title="TFLOPS", log=True), tflops
    title = "Matrix products on the CPU: rate by size"
    if gpu_rows:
        cpu_s = {shape(row): row.median_s for row in cpu_rows}
        main_rows = [row for row in gpu_rows if shape(row) in cpu_s]

        def value(row: Row) -> float:
            return cpu_s[shape(row)] / row.median_s

        fastest = max(main_rows, key=value)
        conclusion += f" The GPU is up to {value(fastest):.3g} times as fast as the CPU"
        conclusion += f" ({case(fastest)})."
        y = Axis(title="CPU time / GPU time (above 1: the GPU is faster)", log=True)
        title = "Matrix products: speed-up of the GPU over the CPU"
    x = Axis(title="rows and columns of each matrix", log=True)
    table = show.table(
        "Products of two square matrices",
        rows,
        show.label("size"),
        show.label("device"),
        show.label("dtype"),
        show.TIME,
        ("TFLOPS", lambda row: f"{tflops(row):.3g}"),
        show.ERROR,
    )
    return Report(
        conclusion=conclusion,
        advice=advice(gpu_rows or cpu_rows, best),
        tables=[table],
        charts={"matmul": line_chart(title, x, y, show.curves(main_rows, "dtype", "size", value))},
        findings=show.wrong_values("matmul", rows, LARGEST_ERROR),
    )


def shape(row: Row) -> tuple[str | int, str | int]:
    """Return dtype and size."""
    return row.labels["dtype"], row.labels["size"]


def case(row: Row) -> str:
    """Return what a row measured."""
    return f"{row.labels['dtype']}, size {row.labels['size']}, {row.labels['device']}"


def advice(rows: Sequence[Row], best: Row) -> str:
    """Compare the fastest dtype with float32."""
    float32 = max(tflops(row) for row in rows if row.labels["dtype"] == "float32")
    ratio = tflops(best) / float32
    if ratio < 1.1:
        return "train in float32; smaller dtypes are not faster on this device."
    name = {"bfloat16": "bf16", "float16": "fp16"}[str(best.labels["dtype"])]
    return (
        f"train with train.precision: {name}; its products are up to {ratio:.2g} times as fast as "
        "those in float32."
    )
