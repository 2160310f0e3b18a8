"""How fast matrices are multiplied here: the question to a process with torch, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.plan.job import Work

PROGRAM = "torchmuster.bench.probes.matmul"
SIZES = (128, 256, 512, 1024, 2048, 4096)
# Without --sizes a product that takes longer is left out: a bench is to take a minute, not an hour.
LONGEST_S, LONGEST_QUICK_S = 0.5, 0.02
ROUNDS, ROUNDS_QUICK = 15, 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A product: (rows x inner) times (inner x columns)."""

    rows: int
    inner: int
    columns: int
    layer: str = (
        ""  # the layer of a model that computes it, where it is one's; * stands for a number
    )
    times: int = 1  # so often in one forward

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def name(self) -> str:
        """The shape as people write it."""
        if self.rows == self.inner == self.columns:
            return str(self.rows)
        return f"{self.rows} x {self.inner} x {self.columns}"


@dataclass(frozen=True, kw_only=True)
class MatmulRequest:
    """What is to be multiplied: these shapes, or those of a model's linear layers."""

    device: Literal["auto", "cpu"]
    shapes: tuple[Shape, ...] = ()
    work: Work | None = None
    micro_batch_size: int = 1
    rounds: int = ROUNDS
    longest_s: float | None = LONGEST_S  # of one product; None: however long it takes


@dataclass(frozen=True, kw_only=True)
class Product:
    """One shape in one number type on one device. What was left out has no times, but the reason."""

    shape: Shape
    number_type: str  # float32, tf32, bfloat16, float16
    on_cpu: bool
    call_s: tuple[float, ...] = ()
    error: float | None = None  # of some rows against float64: norm of the difference over the norm
    right: bool = True  # whether that is as good as the number type can be
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class MatmulAnswer:
    """What the process found."""

    device: str  # as torch names it
    device_name: str  # as its driver names it
    threads: int  # that torch computes with on the CPU
    products: tuple[Product, ...]
    missing_types: Mapping[str, str]  # number types that were not measured, and why

    @property
    def measured(self) -> tuple[Product, ...]:
        """Those that were not left out."""
        return tuple(one for one in self.products if one.call_s)


def squares(sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    """Return the shapes of products of square matrices."""
    return tuple(Shape(rows=one, inner=one, columns=one) for one in sorted(set(sizes)))


def measure(
    request: MatmulRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> MatmulAnswer:
    """Multiply in a process of its own."""
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
