"""Deliberately unstable training runs in each precision: results and findings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.report.report import Picture, Table
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Curve, line_chart

Case = Literal["large losses", "large activations"]
CASES: tuple[Case, ...] = ("large losses", "large activations")


@dataclass(frozen=True, kw_only=True)
class Course:
    """The training of one unstable model in one precision."""

    case: Case
    precision: str
    losses: tuple[float | None, ...]  # of each step; None: not finite
    scales: tuple[float, ...] = ()  # of the loss after each step; fp16 only
    skipped: tuple[int, ...] = ()  # numbers of the skipped steps
    culprit: str = ""  # the first non-finite tensor, in the first of them
    kind: str = ""  # NaN, Inf or -Inf
    in_forward: bool = False  # the forward was not finite: no loss scale can fix that

    @property
    def learnt(self) -> bool:
        """Whether the loss decreased."""
        first, last = self.losses[0], self.losses[-1]
        return first is not None and last is not None and last < first


def stability_findings(courses: Sequence[Course]) -> Iterator[Finding]:
    """Yield the findings of each case."""
    for case in CASES:
        of_case = {one.precision: one for one in courses if one.case == case}
        if "fp16" in of_case:
            yield _of_fp16(of_case["fp16"])
        if "bf16" in of_case:
            yield _of_bf16(of_case["bf16"])


def _of_fp16(course: Course) -> Finding:
    steps, lost = len(course.losses), len(course.skipped)
    name = f"stability-{course.case.replace(' ', '-')}-fp16"
    if not lost:
        return Finding(
            name=name,
            status=Status.OK,
            what=f"{course.case}: fp16 overflowed in none of {steps} steps on this device",
        )
    where = f"{course.kind} in {course.culprit}" if course.culprit else "a gradient was not finite"
    scale = f"the loss scale started at 65536 and ended at {course.scales[-1]:g}"
    if course.in_forward:
        return Finding(
            name=name,
            status=Status.NOTE,
            what=f"{course.case}: fp16 skipped {lost} of {steps} steps: {where}, in the forward pass itself",
            why=f"fp16 overflows above 65504; {scale}; no loss scale can fix the forward pass",
            fix="use bf16; or compute that layer in fp32, or add a normalization before it",
        )
    return Finding(
        name=name,
        status=Status.NOTE,
        what=f"{course.case}: fp16 skipped {lost} of {steps} steps before the loss scale was low enough",
        why=f"{where}; {scale}"
        + ("" if course.learnt else "; the model did not learn, since too few steps were left"),
        fix="skipped steps at the beginning are normal; bf16 needs no loss scale",
    )


def _of_bf16(course: Course) -> Finding:
    name = f"stability-{course.case.replace(' ', '-')}-bf16"
    if course.skipped or not course.learnt:
        lost = f"{len(course.skipped)} of {len(course.losses)} steps were skipped"
        return Finding(
            name=name,
            status=Status.WARNING,
            what=f"{course.case}: bf16 failed on this device: {lost}",
            why=f"{course.kind} in {course.culprit}" if course.culprit else "the loss did not fall",
            fix="use fp32 for models like this one; check the device with muster doctor",
        )
    return Finding(
        name=name,
        status=Status.OK,
        what=f"{course.case}: bf16 skipped none of {len(course.losses)} steps and learned without a "
        "loss scale",
        why="bf16 has the range of fp32 with fewer digits",
    )


def stability_table(courses: Sequence[Course]) -> Table:
    """Return the table of all training runs."""
    return Table(
        title="two deliberately unstable models",
        head=("model", "precision", "first loss", "last loss", "skipped steps", "first not finite"),
        rows=tuple(
            (
                one.case,
                one.precision,
                _bench_stability_loss(one.losses[0]),
                _bench_stability_loss(one.losses[-1]),
                f"{len(one.skipped)} of {len(one.losses)}",
                f"{one.culprit} ({one.kind})" if one.culprit else "-",
            )
            for one in courses
        ),
    )


def _bench_stability_loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def stability_pictures(courses: Sequence[Course]) -> Iterator[Picture]:
    """Draw the losses of each case, and fp16's scales."""
    for case in CASES:
        of_case = [one for one in courses if one.case == case]
        if not of_case:
            continue
        yield Picture(
            title=f"losses of {case}",
            svg=line_chart(
                f"A model with {case}, in each precision",
                Axis(title="step"),
                Axis(title="loss"),
                [
                    Curve(name=one.precision, points=points)
                    for one in of_case
                    if (points := _points(one.losses))
                ],
            ),
            caption="Where a curve is missing or ends, the loss is not finite.",
        )
    scaled = [one for one in courses if one.scales]
    if scaled:
        yield Picture(
            title="loss scale of fp16",
            svg=line_chart(
                "fp16's loss scale: halved when a gradient overflows, doubled after steps without overflow",
                Axis(title="step"),
                Axis(title="scale", log=True),
                [Curve(name=one.case, points=list(enumerate(one.scales))) for one in scaled],
            ),
            caption="A scale that becomes constant fits the gradients; a scale that keeps falling "
            "means that the forward pass itself overflows.",
        )


def _points(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(float(step), loss) for step, loss in enumerate(losses) if loss is not None]
