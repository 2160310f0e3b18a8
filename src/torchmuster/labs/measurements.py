"""The report of a lab: grade, measurements of the learner's code, questions and answers."""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import msgspec

from torchmuster.errors import MusterError
from torchmuster.labs import grading
from torchmuster.labs.grading import mistake_finding
from torchmuster.labs.lesson import ANYWHERE
from torchmuster.labs.workspace import Workspace
from torchmuster.pages import charts, frame


class Table(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A table."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One curve."""

    name: str
    points: list[tuple[float, float]]


class Curves(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Curves over one axis; units as in ``pages.charts.amount_text``."""

    title: str
    x: str
    y: str
    series: list[Series]
    x_unit: str = ""
    y_unit: str = ""
    x_log: bool = False


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Values to be compared."""

    title: str
    unit: str
    values: dict[str, float]


Part = Table | Curves | Bars


_MEASURER = "torchmuster.labs.probes.measurer"
DEADLINE_S = 120.0


class MeasureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to the measurer."""

    lab: str
    file: str
    deadline_s: float = DEADLINE_S


class MeasureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements and their environment, or the mistake that prevented them."""

    parts: list[Part]
    measured_on: str
    mistake: str = ""
    seen: str = ""


def measure_lesson(desk: Workspace, say: Callable[[str], None] = lambda _: None) -> MeasureAnswer:
    """Run a lab's measurements with the learner's code."""
    request = MeasureRequest(lab=desk.lesson.name, file=str(Path(desk.file).resolve()))
    told = grading.ask_examiner(
        _MEASURER, msgspec.json.encode(request), within_s=60 + 2 * DEADLINE_S, gpus=True, say=say
    )
    answer = msgspec.json.decode(told, type=MeasureAnswer)
    if answer.mistake:
        word = desk.lesson.words.get(answer.mistake) or ANYWHERE[answer.mistake]
        raise MusterError(
            f"the report of {desk.lesson.name} needs working code: {word.what}",
            why=answer.seen or word.why,
            fix=f"muster lab check {desk.lesson.name}",
        )
    return answer


def lab_page(desk: Workspace, answer: MeasureAnswer) -> str:
    """Return a lab's report."""
    lesson = desk.lesson
    parts = [
        f"<h1>{escape(lesson.title)}</h1>",
        f"<p>{escape(_graded(desk))} Measured with {escape(answer.measured_on)}.</p>",
        *_mistakes(desk),
        "<h2>Measurements</h2>",
        *(_part(one) for one in answer.parts),
        "<h2>Questions</h2>",
        *_questions(desk),
        "<h2>Differences on GPUs</h2>",
        f"<p>{escape(lesson.on_gpus)}</p>",
    ]
    return frame.html_page(f"lab {lesson.name}", parts)


def _graded(desk: Workspace) -> str:
    grade = desk.grade()
    if grade is None:
        return f"Not graded yet: muster lab check {desk.lesson.name}."
    later = "" if grade.of == desk.fingerprint() else " (the file has changed since)"
    return f"{grade.points} of {desk.lesson.points} points{later}."


def _mistakes(desk: Workspace) -> Iterator[str]:
    grade = desk.grade()
    for verdict in grade.verdicts if grade else ():
        if verdict.mistake:
            yield frame.html_article(mistake_finding(desk.lesson, verdict))


def _part(part: Part) -> str:
    match part:
        case Table():
            body = frame.html_table(part.columns, part.rows)
            return f"<h3>{escape(part.title)}</h3>{body}"
        case Curves():
            curves = [charts.Curve(name=one.name, points=one.points) for one in part.series]
            x = charts.Axis(title=part.x, unit=part.x_unit, log=part.x_log)
            y = charts.Axis(title=part.y, unit=part.y_unit)
            return f"<figure>{charts.line_chart(part.title, x, y, curves)}</figure>"
        case Bars():
            bars = [charts.Bar(name=name, value=value) for name, value in part.values.items()]
            return f"<figure>{charts.bar_chart(part.title, part.unit, bars)}</figure>"


def _questions(desk: Workspace) -> Iterator[str]:
    pairs = zip(desk.lesson.questions, desk.answers(), strict=True)
    for place, (question, answer) in enumerate(pairs, 1):
        given = f"<pre>{escape(answer)}</pre>" if answer else "<p>Not answered yet: answers.md.</p>"
        yield f"<article><b>{place}. {escape(question)}</b>{given}</article>"
