"""What becomes of trainings that are made to be unstable, in each number type: how they went, and what that means."""

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
    """How the training of one such model went in one precision."""

    case: Case
    precision: str
    losses: tuple[float | None, ...]  # of each step; None: not finite
    scales: tuple[float, ...] = ()  # of the loss after each step; fp16 only
    skipped: tuple[int, ...] = ()  # steps that were not applied, by number
    culprit: str = ""  # what was not finite first, in the first of them
    kind: str = ""  # NaN, Inf or -Inf
    in_forward: bool = (
        False  # already the forward was not finite: no scale of the loss can mend that
    )

    @property
    def learnt(self) -> bool:
        """Whether it ended with a lower loss than it began with."""
        first, last = self.losses[0], self.losses[-1]
        return first is not None and last is not None and last < first


def stability_findings(courses: Sequence[Course]) -> Iterator[Finding]:
    """Say what each case shows."""
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
    scale = f"the loss scale, first 65536, was {course.scales[-1]:g} in the end"
    if course.in_forward:
        return Finding(
            name=name,
            status=Status.NOTE,
            what=f"{course.case}: fp16 lost {lost} of {steps} steps: {where}, already in the forward",
            why=f"fp16 ends at 65504; {scale}, and no scale can mend a forward",
            fix="use bf16; or compute that layer in fp32, or put a normalisation before it",
        )
    return Finding(
        name=name,
        status=Status.NOTE,
        what=f"{course.case}: fp16 lost {lost} of {steps} steps, and its loss scale mended it",
        why=f"{where}; {scale}"
        + ("" if course.learnt else "; even so it did not learn, since too few steps were left"),
        fix="lost steps at the beginning are normal; bf16 needs no scale",
    )


def _of_bf16(course: Course) -> Finding:
    name = f"stability-{course.case.replace(' ', '-')}-bf16"
    if course.skipped or not course.learnt:
        lost = f"{len(course.skipped)} of {len(course.losses)} steps were lost"
        return Finding(
            name=name,
            status=Status.WARNING,
            what=f"{course.case}: bf16 did not survive on this device: {lost}",
            why=f"{course.kind} in {course.culprit}" if course.culprit else "the loss did not fall",
            fix="use fp32 for models like this one; muster doctor looks at the device",
        )
    return Finding(
        name=name,
        status=Status.OK,
        what=f"{course.case}: bf16 lost none of {len(course.losses)} steps and learnt, without a loss scale",
        why="it has the range of fp32, with fewer digits",
    )


def stability_table(courses: Sequence[Course]) -> Table:
    """Return how all courses went."""
    return Table(
        title="two models that are made to be unstable",
        head=("model", "precision", "first loss", "last loss", "lost steps", "first not finite"),
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
            caption="A curve that is missing, or ends, was not finite from there on.",
        )
    scaled = [one for one in courses if one.scales]
    if scaled:
        yield Picture(
            title="loss scale of fp16",
            svg=line_chart(
                "fp16's loss scale: halved when a gradient overflows, doubled after steps without",
                Axis(title="step"),
                Axis(title="scale", log=True),
                [Curve(name=one.case, points=list(enumerate(one.scales))) for one in scaled],
            ),
            caption="One that comes to rest has found gradients that fit; one that falls to the end has "
            "nothing to find, since the forward itself overflows.",
        )


def _points(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(float(step), loss) for step, loss in enumerate(losses) if loss is not None]
