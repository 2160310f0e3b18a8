"""Grade files with the examiner process, and report the result of each exercise.

The examiner is a separate process with torch (``probes/examiner.py``); this side does not need
torch.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.labs.lesson import ANYWHERE, Exercise, Lesson

# How long an exercise may take; the longest solution needs a twentieth of it.
DEADLINE_S = 30.0
_SAY_EVERY_S = 8.0  # maximum time without a progress message
EXAMINER = "torchmuster.labs.probes.examiner"


class Paper(msgspec.Struct, frozen=True, kw_only=True):
    """A file to grade, and its exercises."""

    file: str
    exercises: tuple[str, ...]


class GradeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to the examiner."""

    lab: str
    papers: tuple[Paper, ...]
    deadline_s: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an exercise: the name of the mistake (none if correct), and the evidence."""

    exercise: str
    mistake: str = ""
    seen: str = ""


def grade_paper(
    lesson: Lesson,
    papers: Sequence[Paper],
    *,
    deadline_s: float = DEADLINE_S,
    say: Callable[[str], None] = lambda _: None,
) -> list[tuple[Verdict, ...]]:
    """Return a verdict on each exercise of each paper. All papers share one examiner."""
    request = GradeRequest(lab=lesson.name, papers=tuple(papers), deadline_s=deadline_s)
    exercises = sum(len(paper.exercises) for paper in papers)
    # The examiner kills exercises beyond their deadline; this is the deadline of the examiner
    # itself.
    within_s = 60 + 2 * deadline_s * exercises
    answer = ask_examiner(msgspec.json.encode(request), within_s=within_s, say=say)
    return msgspec.json.decode(answer, type=list[tuple[Verdict, ...]])


def points(lesson: Lesson, verdicts: Sequence[Verdict]) -> int:
    """Return the points of the verdicts."""
    return sum(
        lesson.exercise(verdict.exercise).points for verdict in verdicts if not verdict.mistake
    )


def mistake_finding(lesson: Lesson, verdict: Verdict) -> Finding:
    """Return a verdict as a finding."""
    exercise = lesson.exercise(verdict.exercise)
    if not verdict.mistake:
        return Finding(
            name=exercise.name, status=Status.OK, what=f"{_headline(exercise, exercise.points)}"
        )
    word = lesson.words.get(verdict.mistake) or ANYWHERE[verdict.mistake]
    not_yet = verdict.mistake == "not-done"
    return Finding(
        name=verdict.mistake,
        status=Status.NOTE if not_yet else Status.FAILURE,
        what=f"{_headline(exercise, 0)}: {word.what}",
        why=word.why,
        fix=word.fix,
        evidence=verdict.seen,
    )


def _headline(exercise: Exercise, got: int) -> str:
    return f"{exercise.name} ({got} of {exercise.points} points)"


def ask_examiner(request: bytes, *, within_s: float, say: Callable[[str], None]) -> bytes:
    """Run the examiner with a request in a separate process, and return its answer."""
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the same points on every machine
    with tempfile.TemporaryDirectory(prefix="muster-lab-") as name:
        request_file, answer_file = Path(name) / "request.json", Path(name) / "answer.json"
        request_file.write_bytes(request)
        process = subprocess.Popen(
            [sys.executable, "-m", EXAMINER, str(request_file), str(answer_file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            errors = _wait_grading(process, within_s, say)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode or not answer_file.exists():
            raise MusterError(
                "the lab could not be run",
                why="\n".join(errors.splitlines()[-4:]),
                fix="muster doctor",
            )
        return answer_file.read_bytes()


def _wait_grading(
    process: "subprocess.Popen[str]", within_s: float, say: Callable[[str], None]
) -> str:
    """Return the standard error of the process after it has exited."""
    began = time.monotonic()
    while (took_s := time.monotonic() - began) < within_s:
        try:
            return process.communicate(timeout=min(_SAY_EVERY_S, within_s - took_s))[1]
        except subprocess.TimeoutExpired:
            took_s = time.monotonic() - began
            say(
                f"your code has been running for {took_s:.0f} s; hanging exercises will be killed "
                "and reported"
            )
    raise MusterError(
        f"the lab's code did not finish within {within_s:g} s",
        fix="try again on an idle machine",
    )
