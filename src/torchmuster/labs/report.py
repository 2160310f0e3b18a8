"""The report of a lab: grade, mistakes, the learner's plots, questions and answers."""

from html import escape
from urllib.parse import quote

from torchmuster.labs.grading import mistake_finding
from torchmuster.labs.workspace import LabFolder
from torchmuster.pages import frame

PLOT_SUFFIXES = (".png", ".svg")


def lab_page(lab: LabFolder) -> str:
    """Return a lab's report as HTML, with links to the plots in the lab's folder."""
    lesson, grade = lab.lesson, lab.grade()
    parts = [f"<h1>{escape(lesson.title)}</h1>"]
    if grade is None:
        parts.append(f"<p>Not graded yet: muster lab check {lesson.name}.</p>")
    else:
        parts.append(f"<p>{grade.points} of {lesson.points} points</p>")
        for verdict in grade.verdicts:
            if verdict.mistake:
                parts.append(frame.html_article(mistake_finding(lesson, verdict)))
    for file in sorted(lab.path.iterdir()):
        if file.suffix in PLOT_SUFFIXES:
            parts.append(f'<p>Plot: <a href="{quote(file.name)}">{escape(file.name)}</a></p>')
    parts.append("<h2>Questions</h2>")
    for question, answer in lab.answers():
        body = "<p>Not answered yet: answers.md.</p>"
        if answer:
            body = f"<pre>{escape(answer)}</pre>"
        parts.append(f"<article><b>{escape(question)}</b>{body}</article>")
    return frame.html_page(f"lab {lesson.name}", parts)
