"""Grades files: ``python -m torchmuster.labs.probes.examiner REQUEST ANSWER``."""

import importlib
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from torchmuster.labs import lesson as lessons
from torchmuster.labs.grading import GradeRequest, Paper, Verdict
from torchmuster.labs.lesson import Lesson
from torchmuster.labs.probes import ranks


def main(request_file: str, answer_file: str) -> None:
    """Grade every paper of a request."""
    torch.compiler.reset()  # imports torch's compiler, a second of work that each rank's first optimizer would do
    request = msgspec.json.decode(Path(request_file).read_bytes(), type=GradeRequest)
    lesson = lessons.lesson(request.lab)
    verdicts = [
        tuple(
            _examiner_verdict(lesson, paper, name, request.deadline_s) for name in paper.exercises
        )
        for paper in request.papers
    ]
    Path(answer_file).write_bytes(msgspec.json.encode(verdicts))


def _examiner_verdict(lesson: Lesson, paper: Paper, name: str, deadline_s: float) -> Verdict:
    exercise = lesson.exercise(name)
    checks = importlib.import_module(f"torchmuster.labs.lessons.{lesson.module}.checks").CHECKS
    with tempfile.TemporaryDirectory(prefix="muster-lab-") as folder:
        outcome = ranks.worst(
            ranks.run_learner_ranks(
                checks[name],
                file=Path(paper.file),
                ranks=exercise.ranks,
                joined=exercise.joined,
                folder=Path(folder),
                deadline_s=deadline_s,
            )
        )
    return Verdict(exercise=name, mistake=outcome.mistake, seen=outcome.seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
