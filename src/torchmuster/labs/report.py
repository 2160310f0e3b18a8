"""The report of a lab: grade, mistakes, the learner's plots, questions and answers."""

from html import escape
from urllib.parse import quote

from torchmuster.labs.grading import mistake_finding
from torchmuster.labs.workspace import Workspace
from torchmuster.pages import frame

PLOT_SUFFIXES = (".png", ".svg")


def lab_page(workspace: Workspace) -> str:
    """Return a lab's report as HTML, with links to the plots in the lab's folder."""
    lesson, grade = workspace.lesson, workspace.grade()
    points, mistakes = f"Not graded yet: muster lab check {lesson.name}.", []
    if grade is not None:
        points = f"{grade.points} of {lesson.points} points"
        if workspace.is_changed:
            points += " (the file has changed since)"
        for verdict in grade.verdicts:
            if verdict.mistake:
                mistakes.append(frame.html_article(mistake_finding(lesson, verdict)))
    parts = [f"<h1>{escape(lesson.content.title)}</h1>", f"<p>{escape(points)}</p>", *mistakes]
    files = sorted(path for path in workspace.folder.iterdir() if path.suffix in PLOT_SUFFIXES)
    if files:
        parts.append("<h2>Plots</h2>")
    for file in files:
        parts.append(f'<p><a href="{quote(file.name)}">{escape(file.name)}</a></p>')
    parts.append("<h2>Questions</h2>")
    for question, answer in workspace.answers():
        body = "<p>Not answered yet: answers.md.</p>"
        if answer:
            body = f"<pre>{escape(answer)}</pre>"
        parts.append(f"<article><b>{escape(question)}</b>{body}</article>")
    return frame.html_page(f"lab {lesson.name}", parts)
