"""A lab of the course: a folder with text, solution, tests, and texts about mistakes; without torch.

::

    lessons/ddp/README.md          the text to read
    lessons/ddp/solution.py        the solution; the starter is made from it
    lessons/ddp/tests/test_ddp.py  one test for each exercise
    lessons/ddp/answers.md         questions for the report
    lessons/ddp/lab.toml           points of the exercises, and hints for known mistakes
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.errors import Impossible

NAMES = (
    "communication",
    "ddp",
    "gpu-basics",
    "mixed-precision",
    "distributed",
    "memory",
    "pipeline",
)
TO_PASS = 70  # of the 100 points of the labs from gpu-basics to pipeline
GENERAL_HINTS = Path(__file__).parent / "hints.toml"  # mistakes that any exercise can have
_LESSONS = Path(__file__).parent / "lessons"
# Marks of a gap: the learner writes the lines between them.
_BEGIN, _END = "# solution", "# end of solution"


class Hint(msgspec.Struct, frozen=True):
    """The text about a mistake: what is wrong, its effect, how to fix it."""

    what: str
    why: str
    fix: str


class Exercise(msgspec.Struct, frozen=True, kw_only=True):
    """An exercise, graded on ``ranks`` ranks, with a process group unless ``joined`` is false."""

    name: str
    points: int
    ranks: int = 2
    joined: bool = True


class Lesson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lab: the content of its lab.toml, and where its files are."""

    name: str  # such as gpu-basics
    title: str
    exercises: tuple[Exercise, ...]
    hints: dict[str, Hint]  # by mistake, of this lab and of any
    counts: bool = False  # towards the 100 points of the course

    @property
    def module(self) -> str:
        """The lab's module name: its folder here, and the learner's file without ``.py``."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> Path:
        """The folder with the content of the lab."""
        return _LESSONS / self.module

    @property
    def tests(self) -> Path:
        """The file with the lab's tests."""
        return self.folder / "tests" / f"test_{self.module}.py"

    @property
    def points(self) -> int:
        """The points of the lab."""
        return sum(exercise.points for exercise in self.exercises)

    def exercise(self, name: str) -> Exercise:
        """Return one exercise by its name."""
        return next(exercise for exercise in self.exercises if exercise.name == name)

    def solution(self, *, gaps: bool = False) -> str:
        """Return the reference solution; with ``gaps`` it is the starter."""
        return without_marks((self.folder / "solution.py").read_text(encoding="utf-8"), gaps=gaps)


def lesson(name: str) -> Lesson:
    """Return a lab by its name."""
    if name not in NAMES:
        raise Impossible(
            f"unknown lab {name!r}",
            why=f"the labs are: {', '.join(NAMES)}",
            fix="muster lab list",
        )
    content = _toml(_LESSONS / name.replace("-", "_") / "lab.toml")
    content["hints"] |= _toml(GENERAL_HINTS)
    return msgspec.convert({"name": name, **content}, Lesson)


def without_marks(solution: str, *, gaps: bool) -> str:
    """Return a solution without its marks; with ``gaps``, its marked parts raise NotImplementedError."""
    lines: list[str] = []
    is_gap = False
    for line in solution.splitlines():
        if line.strip() == _BEGIN:
            is_gap = gaps
            if is_gap:
                indent = line.removesuffix(_BEGIN)
                lines.append(f"{indent}# YOUR CODE HERE")
                lines.append(f'{indent}raise NotImplementedError("a gap")')
        elif line.strip() == _END:
            is_gap = False
        elif not is_gap:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))
