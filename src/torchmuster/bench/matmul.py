"""Matrix multiplication speed: request to a process with torch, its answer and the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.environment import Environment
from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import BenchRecord, Json, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Bar, Curve, amount_text, bar_chart, line_chart
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu
from torchmuster.plan.job import Work

PROGRAM = "torchmuster.bench.probes.matmul"
SIZES = (128, 256, 512, 1024, 2048, 4096)
# Without --sizes, a product that takes longer is skipped, so that the bench takes about a minute.
LONGEST_S, LONGEST_QUICK_S = 0.5, 0.02
ROUNDS, ROUNDS_QUICK = 15, 7


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """A product: (rows x inner) times (inner x columns)."""

    rows: int
    inner: int
    columns: int
    layer: str = ""  # the model's layer that computes it, if any; * stands for a number
    times: int = 1  # number of times in one forward

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def name(self) -> str:
        """The shape as text."""
        if self.rows == self.inner == self.columns:
            return str(self.rows)
        return f"{self.rows} x {self.inner} x {self.columns}"


@dataclass(frozen=True, kw_only=True)
class MatmulRequest:
    """The products to measure: these shapes, or those of a model's linear layers."""

    device: Literal["auto", "cpu"]
    shapes: tuple[MatmulShape, ...] = ()
    work: Work | None = None
    micro_batch_size: int = 1
    rounds: int = ROUNDS
    longest_s: float | None = LONGEST_S  # of one product; None: no limit


@dataclass(frozen=True, kw_only=True)
class Product:
    """One shape in one dtype on one device; if skipped, the reason instead of times."""

    shape: MatmulShape
    number_type: str  # float32, tf32, bfloat16, float16
    on_cpu: bool
    call_s: tuple[float, ...] = ()
    error: float | None = None  # of some rows against float64: norm of the difference over the norm
    right: bool = True  # whether that is within the rounding error of the dtype
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class MatmulAnswer:
    """The answer of the process."""

    device: str  # as torch names it
    device_name: str  # as its driver names it
    threads: int  # CPU threads of torch
    products: tuple[Product, ...]
    missing_types: Mapping[str, str]  # dtypes that were not measured, and why

    @property
    def measured(self) -> tuple[Product, ...]:
        """The products that were not skipped."""
        return tuple(one for one in self.products if one.call_s)


def squares(sizes: tuple[int, ...]) -> tuple[MatmulShape, ...]:
    """Return the shapes of products of square matrices."""
    return tuple(MatmulShape(rows=one, inner=one, columns=one) for one in sorted(set(sizes)))


def measure_matmul(
    request: MatmulRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> MatmulAnswer:
    """Measure in a separate process."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        MatmulAnswer,
        device=device,
        folder=request.work.folder if request.work else ".",
        doing="multiplying matrices",
        say=say,
    )
    return answer


# Minimum gain for a dtype: less does not justify the lost precision.
_WORTH = 1.1


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The rate of one product."""

    product: Product
    flops_s: Estimate
    peak_flops_s: float | None  # peak of the GPU in this dtype; None: unknown

    @property
    def share(self) -> float | None:
        """The share of the peak."""
        return None if self.peak_flops_s is None else self.flops_s.median / self.peak_flops_s


def best_type(rates: Sequence[Rate]) -> Decision[str]:
    """Return the fastest dtype if it gains enough over float32."""
    mine = [one for one in rates if one.product.on_cpu == all(r.product.on_cpu for r in rates)]
    taken_s = {one: total_s(mine, one) for one in types_of(mine)}
    plain_s = taken_s.get("float32")
    if plain_s is None or len(taken_s) < 2:
        return Decision(value="float32", reason="no other dtype was measured")
    best = min(taken_s, key=lambda one: taken_s[one])
    gains = {one: plain_s / one_s for one, one_s in taken_s.items() if one != "float32"}
    others = ", ".join(f"{one} {gain:.3g} times" for one, gain in gains.items())
    if best == "float32" or gains[best] < _WORTH:
        return Decision(
            value="float32", reason=f"no other dtype is much faster for these shapes ({others})"
        )
    return Decision(
        value=best,
        reason=f"multiplies these shapes {gains[best]:.3g} times as fast as float32"
        + (f" ({others})" if len(gains) > 1 else "")
        + "; muster bench precision measures the gain of whole training steps",
    )


def total_s(rates: Sequence[Rate], number_type: str) -> float:
    """Return the total time of the shapes that were measured in every dtype."""
    common = set.intersection(
        *(
            {one.product.shape for one in rates if one.product.number_type == each}
            for each in types_of(rates)
        )
    )
    return sum(
        one.product.shape.times * one.product.shape.flops / one.flops_s.median
        for one in rates
        if one.product.number_type == number_type and one.product.shape in common
    )


def types_of(rates: Sequence[Rate]) -> list[str]:
    """Return the dtypes without duplicates."""
    return list(dict.fromkeys(one.product.number_type for one in rates))


def card_of(answer: MatmulAnswer) -> Gpu | None:
    """Return the catalogue entry of the device; None for CPUs and unknown GPUs."""
    known = None if answer.device == "cpu" else catalogue.find_gpu(answer.device_name)
    return None if known is None else known.card


def rate_of(product: Product, card: Gpu | None) -> Rate:
    """Return the rate of a product, with the peak if known."""
    peak = None
    if card is not None and not product.on_cpu:
        peak = card.flops.get(product.number_type)
    return Rate(
        product=product,
        flops_s=estimate([product.shape.flops / one for one in product.call_s]),
        peak_flops_s=peak,
    )


def speed_ups(rates: Sequence[Rate]) -> dict[str, list[tuple[float, float]]]:
    """Return the speed-up of the accelerator over the CPU, by dtype and size."""
    cpu: dict[tuple[str, MatmulShape], float] = {
        (one.product.number_type, one.product.shape): one.flops_s.median
        for one in rates
        if one.product.on_cpu
    }
    gains: dict[str, list[tuple[float, float]]] = {}
    for one in rates:
        beside = cpu.get((one.product.number_type, one.product.shape))
        if not one.product.on_cpu and beside is not None:
            point = (float(one.product.shape.rows), one.flops_s.median / beside)
            gains.setdefault(one.product.number_type, []).append(point)
    return gains


_NOISY = 0.05


def matmul_report(
    answer: MatmulAnswer,
    *,
    where: Decision[str],
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return the report of the measurement."""
    card = card_of(answer)
    rates = [rate_of(one, card) for one in answer.measured]
    name = environment.cpu if answer.device == "cpu" else answer.device_name
    chosen = best_type(rates)
    on_cpu = answer.device == "cpu"
    question = f"how fast is matrix multiplication on {name}"
    if on_cpu:
        question += f", with {answer.threads} {'thread' if answer.threads == 1 else 'threads'}"
    return Report(
        bench="matmul",
        question=f"{question}?",
        findings=tuple(_matmul_findings(answer, rates, card, name)),
        choices=(Decision(value=f"measured on {name}", reason=where.reason), chosen),
        tables=tuple(_tables(answer, rates)),
        pictures=tuple(_matmul_pictures(rates, name)),
        record=BenchRecord(
            bench="matmul",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(_matmul_series(one) for one in rates),
            facts={
                "device": answer.device_name,
                "threads": answer.threads,
                "best_type": chosen.value,
                "peak_source": card.source if card else None,
                "largest_error": {
                    one: max(
                        rate.product.error or 0.0
                        for rate in rates
                        if rate.product.number_type == one
                    )
                    for one in types_of(rates)
                },
                "not_measured": dict(answer.missing_types),
            },
        ),
        took_s=took_s,
    )


def _matmul_series(rate: Rate) -> Series:
    product, shape = rate.product, rate.product.shape
    labels: dict[str, str | int | float] = {
        "shape": f"{shape.rows}x{shape.inner}x{shape.columns}",
        "type": product.number_type,
        "on": "cpu" if product.on_cpu else "accelerator",
    }
    if shape.layer:
        labels["layer"] = shape.layer
    return Series(
        name="matmul",
        unit="FLOP/s",
        better="higher",
        samples=tuple(shape.flops / one for one in product.call_s),
        labels=labels,
    )


def _matmul_findings(
    answer: MatmulAnswer, rates: Sequence[Rate], card: Gpu | None, name: str
) -> Iterator[Finding]:
    wrong = [one for one in answer.products if not one.right]
    if wrong:
        yield Finding(
            name="matmul-wrong-values",
            status=Status.FAILURE,
            what=f"{name} gives wrong results: {len(wrong)} of {len(answer.products)} products",
            why="the difference from float64 is larger than rounding explains",
            fix="run muster doctor; stop using a device that gives wrong results",
            evidence="\n".join(
                f"{one.shape.name} {one.number_type}: off by {one.error:.2g}" for one in wrong
            ),
        )
    yield from _of_peak(rates, card, name)
    noise = sorted(one.flops_s.noise for one in rates)
    if noise and noise[len(noise) // 2] > _NOISY:
        yield Finding(
            name="matmul-noisy",
            status=Status.WARNING,
            what=f"the median noise of these rates is ±{noise[len(noise) // 2]:.0%}",
            why="other processes use the host, or its clock frequency changes",
            fix="measure again on an idle host",
        )
    left_out = [one for one in answer.products if one.left_out]
    if left_out:
        sizes = sorted({one.shape.rows for one in left_out})
        yield Finding(
            name="matmul-left-out",
            status=Status.NOTE,
            what=f"skipped: {_shapes(left_out)}",
            why=left_out[0].left_out,
            fix=""
            if left_out[0].shape.layer
            else f"muster bench matmul --sizes {' '.join(map(str, sizes))}",
        )


def _shapes(products: Sequence[Product]) -> str:
    by_type: dict[str, list[str]] = {}
    for one in products:
        by_type.setdefault(one.number_type, []).append(one.shape.name)
    return "; ".join(f"{kind} {', '.join(dict.fromkeys(names))}" for kind, names in by_type.items())


def _of_peak(rates: Sequence[Rate], card: Gpu | None, name: str) -> Iterator[Finding]:
    known = [one for one in rates if one.share is not None]
    above = [one for one in known if one.share is not None and one.share > 1.0]
    if above:
        most = max(above, key=lambda one: one.share or 0.0)
        yield Finding(
            name="matmul-above-peak",
            status=Status.FAILURE,
            what=f"{most.product.number_type} at {most.product.shape.name} reached {most.share:.0%} of "
            f"{name}'s peak",
            why="no device exceeds its peak: the catalogue's figure does not apply to this GPU, or "
            "the measurement is wrong",
            fix="compare the peak with the vendor's data sheet; until then do not trust shares "
            "and MFU",
            evidence=f"peak {amount_text(most.peak_flops_s or 0.0, 'FLOP/s')} ({card.source if card else ''}), "
            f"measured {amount_text(most.flops_s.median, 'FLOP/s')}",
        )
        return
    if not known:
        yield Finding(
            name="matmul-peak-unknown",
            status=Status.NOTE,
            what=f"share of the peak unknown: no source gives the peak of {name}",
        )
        return
    best: dict[str, Rate] = {}
    for one in known:
        before = best.get(one.product.number_type)
        if before is None or (one.share or 0.0) > (before.share or 0.0):
            best[one.product.number_type] = one
    yield Finding(
        name="matmul-share-of-peak",
        status=Status.OK,
        what="share of the peak: "
        + ", ".join(
            f"{number_type} {one.share:.0%} at {one.product.shape.name}"
            for number_type, one in best.items()
        ),
        evidence=f"peak: {card.source if card else ''}",
    )


def _tables(answer: MatmulAnswer, rates: Sequence[Rate]) -> Iterator[Table]:
    by_key = {
        (one.product.shape, one.product.number_type, one.product.on_cpu): one for one in rates
    }
    shapes = list(dict.fromkeys(one.shape for one in answer.products))
    places = list(dict.fromkeys((one.number_type, one.on_cpu) for one in answer.products))
    has_layers = any(one.layer for one in shapes)
    both = len({on_cpu for _, on_cpu in places}) > 1
    heads = [
        f"{number_type} on CPU" if both and on_cpu else number_type
        for number_type, on_cpu in places
    ]
    rows = []
    for shape in shapes:
        cells = [_cell(by_key.get((shape, *place))) for place in places]
        first = (shape.layer, shape.name, str(shape.times)) if has_layers else (shape.name,)
        rows.append((*first, *cells))
    first_heads = ("layer", "rows x inner x columns", "times") if has_layers else ("size",)
    yield Table(
        title="one product per layer of a forward pass"
        if has_layers
        else "products of square matrices",
        head=(*first_heads, *heads),
        rows=tuple(rows),
        note="Median of the rounds with its 95 % interval. In brackets: share of the GPU's peak."
        if any(one.share is not None for one in rates)
        else "Median of the rounds with its 95 % interval.",
    )
    if has_layers:
        yield Table(
            title="all linear layers of one forward pass",
            head=("dtype", "time"),
            rows=tuple(
                (kind, amount_text(total_s(rates, kind), "s"))
                for kind in types_of(rates)
                if not both
            ),
            note="Shapes that were measured in all dtypes.",
        )


def _cell(rate: Rate | None) -> str:
    if rate is None:
        return "skipped"
    share = "" if rate.share is None else f" ({rate.share:.0%})"
    return f"{amount_text(rate.flops_s.median, 'FLOP/s')} ±{rate.flops_s.noise:.0%}{share}"


def _matmul_pictures(rates: Sequence[Rate], name: str) -> Iterator[Picture]:
    if any(one.product.shape.layer for one in rates):
        yield Picture(
            title="rate by layer",
            svg=bar_chart(
                f"Products of linear layers on {name}",
                "FLOP/s",
                [
                    Bar(
                        name=f"{one.product.shape.layer} {one.product.number_type}",
                        value=one.flops_s.median,
                        low=one.flops_s.low,
                        high=one.flops_s.high,
                    )
                    for one in rates
                ],
            ),
            caption="The bar is the median, the line its 95 % interval.",
        )
        return
    yield Picture(
        title="rate by size",
        svg=line_chart(
            f"Products of square matrices on {name}",
            Axis(title="rows and columns", log=True),
            Axis(title="rate", unit="FLOP/s", log=True),
            [_matmul_curve(rates, kind, on_cpu) for kind, on_cpu in _curves(rates)],
        ),
        caption="Small products do not use the whole device; where a curve is flat, larger ones "
        "gain nothing.",
    )
    if gains := speed_ups(rates):
        yield Picture(
            title="speed-up over the CPU",
            svg=line_chart(
                f"{name} vs. the CPU of this host, same dtype",
                Axis(title="rows and columns", log=True),
                Axis(title="speed-up", log=True),
                [Curve(name=kind, points=points) for kind, points in gains.items()],
            ),
            caption="Below 1 the CPU is faster: the launch overhead of the accelerator dominates.",
        )


def _curves(rates: Sequence[Rate]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((one.product.number_type, one.product.on_cpu) for one in rates))


def _matmul_curve(rates: Sequence[Rate], number_type: str, on_cpu: bool) -> Curve:
    mine = [
        one
        for one in rates
        if (one.product.number_type, one.product.on_cpu) == (number_type, on_cpu)
    ]
    both = len({one.product.on_cpu for one in rates}) > 1
    return Curve(
        name=f"{number_type} on the CPU" if both and on_cpu else number_type,
        points=[(one.product.shape.rows, one.flops_s.median) for one in mine],
        low=[one.flops_s.low for one in mine],
        high=[one.flops_s.high for one in mine],
        dashed=both and on_cpu,
    )
