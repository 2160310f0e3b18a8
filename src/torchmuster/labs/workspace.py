"""A lab in the learner's folder: exercise file, grade, answers and report.

::

    labs/ddp/README.md            the introduction
    labs/ddp/ddp.py               the starter, edited by the learner
    labs/ddp/tests/test_ddp.py    the tests
    labs/ddp/answers.md           the report's questions, answered by the learner
    labs/ddp/grade.json           the result of ``muster lab check``
    labs/ddp/report.html          the page of ``muster lab report``
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible
from torchmuster.labs.grading import Verdict
from torchmuster.labs.lesson import NAMES, Lesson, lesson
from torchmuster.runfolder import write_atomically

DEFAULT_ROOT = Path("labs")
_QUESTION = re.compile(r"^## (\d+\..*)$", re.MULTILINE)
_NO_ANSWER = "(your answer)"


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``muster lab check``."""

    points: int
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class LabFolder:
    """One lab in the learner's folder."""

    lesson: Lesson
    path: Path

    @property
    def file(self) -> Path:
        """The file that the learner edits."""
        return self.path / f"{self.lesson.module}.py"

    def save_grade(self, grade: Grade) -> None:
        """Save a grade."""
        write_atomically(self.path / "grade.json", msgspec.json.encode(grade).decode() + "\n")

    def grade(self) -> Grade | None:
        """Return the last grade, or None if there is no readable one."""
        try:
            return msgspec.json.decode((self.path / "grade.json").read_bytes(), type=Grade)
        except (OSError, msgspec.MsgspecError):
            return None

    def answers(self) -> list[tuple[str, str]]:
        """Return the questions with their answers; an answer is empty if it is not written yet."""
        path = self.path / "answers.md"
        if not path.exists():
            path = self.lesson.folder / "answers.md"
        questions = _QUESTION.split(path.read_text(encoding="utf-8"))[1:]
        pairs = zip(questions[::2], questions[1::2], strict=True)
        return [(title, answer.strip().replace(_NO_ANSWER, "")) for title, answer in pairs]


def start_lab(lesson: Lesson, root: Path) -> LabFolder:
    """Copy a lab into the learner's folder; never overwrite existing files."""
    lab = LabFolder(lesson, root / lesson.name)
    try:
        lab.path.mkdir(parents=True)
        (lab.path / "tests").mkdir()
        for name in ("README.md", "answers.md", f"tests/{lesson.tests.name}"):
            shutil.copyfile(lesson.folder / name, lab.path / name)
        lab.file.write_text(lesson.solution(gaps=True), encoding="utf-8")
    except FileExistsError:
        raise Impossible(
            f"lab {lesson.name} is already started",
            why=f"{lab.path} exists and is not overwritten",
            fix=f"continue in {lab.file}\nto start over: mv {lab.path} {lab.path}.old",
        ) from None
    except OSError as error:
        raise Impossible(
            f"cannot create {lab.path}",
            why=error.strerror or str(error),
            fix="pass a writable folder: --labs DIR",
        ) from error
    return lab


def find_lab(name: str | None, root: Path) -> LabFolder:
    """Return a started lab: the named one, or that of the current folder."""
    here = Path.cwd().name
    if name is None and here not in NAMES:
        raise Impossible(
            "no lab is named",
            why="the current folder is not that of a lab",
            fix="add the lab's name; the labs are: muster lab list",
        )
    lab = LabFolder(lesson(name or here), root / (name or here))
    inside = LabFolder(lab.lesson, Path())
    if here == lab.lesson.name and inside.file.is_file():
        return inside
    if not lab.file.is_file():
        raise Impossible(
            f"lab {lab.lesson.name} has not been started",
            why=f"there is no {lab.file}",
            fix=f"muster lab start {lab.lesson.name}",
        )
    return lab
