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
from torchmuster.labs import lesson as lessons
from torchmuster.labs.grading import Verdict
from torchmuster.labs.lesson import Lesson
from torchmuster.runfolder import write_atomically

DEFAULT_ROOT = Path("labs")
_QUESTION = re.compile(r"^## (\d+\..*)$", re.MULTILINE)
_NO_ANSWER = "(your answer)"


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``muster lab check``."""

    points: int
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Workspace:
    """One lab in the learner's folder."""

    lesson: Lesson
    folder: Path

    @property
    def file(self) -> Path:
        """The file that the learner edits."""
        return self.folder / self.lesson.file

    @property
    def report(self) -> Path:
        """The page of ``muster lab report``."""
        return self.folder / "report.html"

    @property
    def _grade(self) -> Path:
        return self.folder / "grade.json"

    def keep(self, grade: Grade) -> None:
        """Save a grade."""
        write_atomically(self._grade, msgspec.json.encode(grade).decode() + "\n")

    def grade(self) -> Grade | None:
        """Return the last grade, or None if there is no readable one."""
        try:
            return msgspec.json.decode(self._grade.read_bytes(), type=Grade)
        except (OSError, msgspec.MsgspecError):
            return None

    @property
    def is_changed(self) -> bool:
        """Whether the learner's file is newer than its grade."""
        return self.file.stat().st_mtime > self._grade.stat().st_mtime

    def answers(self) -> list[tuple[str, str]]:
        """Return the questions with their answers; an answer is empty if it is not written yet."""
        path = self.folder / "answers.md"
        if not path.exists():
            path = self.lesson.folder / "answers.md"
        questions = _QUESTION.split(path.read_text(encoding="utf-8"))[1:]
        pairs = zip(questions[::2], questions[1::2], strict=True)
        return [(title, answer.strip().replace(_NO_ANSWER, "")) for title, answer in pairs]


def start_workspace(lesson: Lesson, root: Path) -> Workspace:
    """Copy a lab into the learner's folder; never overwrite existing files."""
    workspace = Workspace(lesson, root / lesson.name)
    try:
        workspace.folder.mkdir(parents=True)
    except FileExistsError:
        raise Impossible(
            f"lab {lesson.name} is already started",
            why=f"{workspace.folder} exists and is not overwritten",
            fix=f"continue in {workspace.file}\nto start over: mv {workspace.folder} {workspace.folder}.old",
        ) from None
    except OSError as error:
        raise Impossible(
            f"cannot create {workspace.folder}",
            why=error.strerror or str(error),
            fix="pass a writable folder: --labs DIR",
        ) from error
    for name in ("README.md", "answers.md"):
        shutil.copyfile(lesson.folder / name, workspace.folder / name)
    (workspace.folder / "tests").mkdir()
    shutil.copyfile(lesson.tests, workspace.folder / "tests" / lesson.tests.name)
    workspace.file.write_text(lesson.starter(), encoding="utf-8")
    return workspace


def find_workspace(name: str | None, root: Path) -> Workspace:
    """Find a started lab: by name, by the current folder, or the one changed last."""
    here = Path.cwd()
    if name in (None, here.name) and here.name in lessons.NAMES:
        inside = Workspace(Lesson(here.name), Path())
        if inside.file.is_file():
            return inside
    if name is not None:
        workspace = Workspace(lessons.lesson(name), root / name)
        if not workspace.file.is_file():
            raise Impossible(
                f"lab {name} has not been started",
                why=f"there is no {workspace.file}",
                fix=f"muster lab start {name}",
            )
        return workspace
    workspaces = [workspace for workspace in all_workspaces(root) if workspace.file.is_file()]
    if not workspaces:
        raise Impossible(
            "no lab has been started here",
            why=f"{root} contains no labs",
            fix="muster lab start communication",
        )
    return max(workspaces, key=lambda workspace: workspace.file.stat().st_mtime)


def all_workspaces(root: Path) -> list[Workspace]:
    """Return a workspace for every lab, started or not."""
    return [Workspace(Lesson(name), root / name) for name in lessons.NAMES]
