"""A lab in the learner's folder: the file that is worked on, the grade it got, answers and report.

::

    labs/ddp/reading.md     what is read first
    labs/ddp/ddp.py         the starter, in which the learner works
    labs/ddp/answers.md     the report's questions, to be answered
    labs/ddp/grade.json     what ``muster lab check`` gave
    labs/ddp/report.html    what ``muster lab report`` made
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible
from torchmuster.labs import lesson as course
from torchmuster.labs.grading import Verdict
from torchmuster.labs.lesson import Lesson
from torchmuster.runfolder import write_atomically

DEFAULT_ROOT = Path("labs")
_QUESTION = re.compile(r"^## (\d+)\..*$", re.MULTILINE)
_NO_ANSWER = "(your answer)"


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What a file got. ``of`` is the file's fingerprint, so that a later change is noticed."""

    of: str
    points: int
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Workspace:
    """One lab in the learner's folder."""

    lesson: Lesson
    folder: Path

    @property
    def file(self) -> Path:
        """The file in which the learner works."""
        return self.folder / self.lesson.file

    @property
    def report(self) -> Path:
        """The page of the learner's measurements."""
        return self.folder / "report.html"

    @property
    def _grade(self) -> Path:
        return self.folder / "grade.json"

    def fingerprint(self) -> str:
        """Return what tells this state of the file from others."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def keep(self, grade: Grade) -> None:
        """Write down a grade."""
        write_atomically(self._grade, msgspec.json.encode(grade).decode() + "\n")

    def grade(self) -> Grade | None:
        """Return the last grade, or None if there is none that can be read."""
        try:
            return msgspec.json.decode(self._grade.read_bytes(), type=Grade)
        except (OSError, msgspec.MsgspecError):
            return None

    def answers(self) -> list[str]:
        """Return what was written below each question; empty where nothing was."""
        try:
            text = (self.folder / "answers.md").read_text(encoding="utf-8")
        except OSError:
            text = ""
        parts = _QUESTION.split(text)[1:]
        given = {
            int(number): answer.strip()
            for number, answer in zip(parts[::2], parts[1::2], strict=True)
        }
        found = [given.get(place, "") for place in range(1, len(self.lesson.questions) + 1)]
        return ["" if one == _NO_ANSWER else one for one in found]


def start_workspace(lesson: Lesson, root: Path) -> Workspace:
    """Copy a lab into the learner's folder; what is there already is never touched."""
    desk = Workspace(lesson, root / lesson.name)
    try:
        desk.folder.mkdir(parents=True)
    except FileExistsError:
        raise Impossible(
            f"lab {lesson.name} has been started before",
            why=f"{desk.folder} exists, and nobody's work is overwritten",
            fix=f"go on in {desk.file}\nto begin anew: mv {desk.folder} {desk.folder}.old",
        ) from None
    except OSError as error:
        raise Impossible(
            f"cannot make {desk.folder}",
            why=error.strerror or str(error),
            fix="give a folder that you may write to: --labs DIR",
        ) from error
    questions = "".join(
        f"## {place}. {question}\n\n{_NO_ANSWER}\n\n"
        for place, question in enumerate(lesson.questions, 1)
    )
    title = f"# {lesson.title}: questions\n\nWhat you write here becomes part of the report.\n\n"
    (desk.folder / "reading.md").write_text(lesson.reading(), encoding="utf-8")
    (desk.folder / "answers.md").write_text(title + questions.rstrip() + "\n", encoding="utf-8")
    desk.file.write_text(lesson.starter(), encoding="utf-8")
    return desk


def find_workspace(name: str | None, root: Path) -> Workspace:
    """Find a lab that was started: by name, as the folder one is in, or as the one changed last."""
    if name is not None:
        return _started(course.lesson(name), root)
    here = Path.cwd()
    if here.name in course.NAMES and (here / course.lesson(here.name).file).is_file():
        return Workspace(course.lesson(here.name), Path())
    desks = [desk for desk in all_workspaces(root) if desk.file.is_file()]
    if not desks:
        raise Impossible(
            "no lab has been started here",
            why=f"{root} holds none",
            fix="muster lab start communication",
        )
    return max(desks, key=lambda desk: desk.file.stat().st_mtime)


def all_workspaces(root: Path) -> list[Workspace]:
    """Return a desk for every lab, started or not."""
    return [Workspace(lesson, root / lesson.name) for lesson in course.lessons()]


def _started(lesson: Lesson, root: Path) -> Workspace:
    desk = Workspace(lesson, root / lesson.name)
    here = Path.cwd()
    if not desk.file.is_file() and here.name == lesson.name and (here / lesson.file).is_file():
        return Workspace(lesson, Path())
    if not desk.file.is_file():
        raise Impossible(
            f"lab {lesson.name} has not been started",
            why=f"there is no {desk.file}",
            fix=f"muster lab start {lesson.name}",
        )
    return desk
