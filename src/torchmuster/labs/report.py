"""The page of a lab: the grade, what was measured of the learner's code, questions and their answers."""

from collections.abc import Iterator
from html import escape

from torchmuster.labs.desk import Desk
from torchmuster.labs.grading import as_finding
from torchmuster.labs.measured import Bars, Curves, Part, Table
from torchmuster.labs.measuring import Answer
from torchmuster.pages import charts, frame


def page(desk: Desk, answer: Answer) -> str:
    """Return a lab's report."""
    lesson = desk.lesson
    parts = [
        f"<h1>{escape(lesson.title)}</h1>",
        f"<p>{escape(_graded(desk))} Measured with {escape(answer.measured_on)}.</p>",
        *_mistakes(desk),
        "<h2>What was measured</h2>",
        *(_part(one) for one in answer.parts),
        "<h2>Questions</h2>",
        *_questions(desk),
        "<h2>What differs on GPUs</h2>",
        f"<p>{escape(lesson.on_gpus)}</p>",
    ]
    return frame.page(f"lab {lesson.name}", parts)


def _graded(desk: Desk) -> str:
    grade = desk.grade()
    if grade is None:
        return f"Not graded yet: muster lab check {desk.lesson.name}."
    later = "" if grade.of == desk.fingerprint() else " (the file has changed since)"
    return f"{grade.points} of {desk.lesson.points} points{later}."


def _mistakes(desk: Desk) -> Iterator[str]:
    grade = desk.grade()
    for verdict in grade.verdicts if grade else ():
        if verdict.mistake:
            yield frame.article(as_finding(desk.lesson, verdict))


def _part(part: Part) -> str:
    match part:
        case Table():
            body = frame.table(part.columns, part.rows)
            return f"<h3>{escape(part.title)}</h3>{body}"
        case Curves():
            curves = [charts.Curve(name=one.name, points=one.points) for one in part.series]
            x = charts.Axis(title=part.x, unit=part.x_unit, log=part.x_log)
            y = charts.Axis(title=part.y, unit=part.y_unit)
            return f"<figure>{charts.lines(part.title, x, y, curves)}</figure>"
        case Bars():
            bars = [charts.Bar(name=name, value=value) for name, value in part.values.items()]
            return f"<figure>{charts.bars(part.title, part.unit, bars)}</figure>"


def _questions(desk: Desk) -> Iterator[str]:
    pairs = zip(desk.lesson.questions, desk.answers(), strict=True)
    for place, (question, answer) in enumerate(pairs, 1):
        given = f"<pre>{escape(answer)}</pre>" if answer else "<p>Not answered yet: answers.md.</p>"
        yield f"<article><b>{place}. {escape(question)}</b>{given}</article>"
