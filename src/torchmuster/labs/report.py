"""The report of a lab: grade, mistakes, the learner's plots, questions and answers."""

from collections.abc import Iterator
from html import escape
from urllib.parse import quote

from torchmuster.labs.grading import mistake_finding
from torchmuster.labs.workspace import Workspace
from torchmuster.pages import frame

PLOT_SUFFIXES = (".png", ".svg")


def lab_page(workspace: Workspace) -> str:
    """Return a lab's report as HTML, with links to the plots in the lab's folder."""
    lesson = workspace.lesson
    parts = [
        f"<h1>{escape(lesson.content.title)}</h1>",
        f"<p>{escape(_points_text(workspace))}</p>",
        *_mistakes(workspace),
        *_plots(workspace),
        "<h2>Questions</h2>",
        *_questions(workspace),
    ]
    return frame.html_page(f"lab {lesson.name}", parts)


def _points_text(workspace: Workspace) -> str:
    grade = workspace.grade()
    if grade is None:
        return f"Not graded yet: muster lab check {workspace.lesson.name}."
    text = f"{grade.points} of {workspace.lesson.points} points"
    if grade.of != workspace.fingerprint():
        text += " (the file has changed since)"
    return f"{text}."


def _mistakes(workspace: Workspace) -> Iterator[str]:
    grade = workspace.grade()
    if grade is None:
        return
    for verdict in grade.verdicts:
        if verdict.mistake:
            yield frame.html_article(mistake_finding(workspace.lesson, verdict))


def _plots(workspace: Workspace) -> Iterator[str]:
    files = sorted(path for path in workspace.folder.iterdir() if path.suffix in PLOT_SUFFIXES)
    if not files:
        return
    links = [f'<li><a href="{quote(file.name)}">{escape(file.name)}</a></li>' for file in files]
    yield f"<h2>Plots</h2><ul>{''.join(links)}</ul>"


def _questions(workspace: Workspace) -> Iterator[str]:
    for question, answer in workspace.answers():
        body = "<p>Not answered yet: answers.md.</p>"
        if answer:
            body = f"<pre>{escape(answer)}</pre>"
        yield f"<article><b>{escape(question)}</b>{body}</article>"
