"""A lab of the course: a folder with text, solution, tests, and texts about mistakes; without torch.

::

    lessons/ddp/README.md          the text to read
    lessons/ddp/solution.py        the solution; the starter is made from it
    lessons/ddp/tests/test_ddp.py  one test for each exercise
    lessons/ddp/answers.md         questions for the report
    lessons/ddp/lab.toml           points of the exercises, and hints for known mistakes
"""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
    "machines",
    "lost-node",
)
TO_PASS = 70  # of the 100 points of the labs from gpu-basics to pipeline
_HERE = Path(__file__).parent
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


class LabFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a lab.toml."""

    title: str
    exercises: tuple[Exercise, ...]
    hints: dict[str, Hint]
    counts: bool = False  # towards the 100 points of the course


@dataclass(frozen=True)
class Lesson:
    """A lab, by its name, such as ``gpu-basics``."""

    name: str

    @property
    def module(self) -> str:
        """The lab's module name: its folder here, and the learner's file without ``.py``."""
        return self.name.replace("-", "_")

    @property
    def file(self) -> str:
        """The name of the learner's file."""
        return f"{self.module}.py"

    @property
    def folder(self) -> Path:
        """The folder with the content of the lab."""
        return _HERE / "lessons" / self.module

    @property
    def tests(self) -> Path:
        """The file with the lab's tests."""
        return self.folder / "tests" / f"test_{self.module}.py"

    @cached_property
    def content(self) -> LabFile:
        """Title, exercises and hints."""
        text = (self.folder / "lab.toml").read_text(encoding="utf-8")
        return msgspec.convert(tomllib.loads(text), LabFile)

    @property
    def points(self) -> int:
        """The points of the lab."""
        return sum(exercise.points for exercise in self.content.exercises)

    def exercise(self, name: str) -> Exercise:
        """Return one exercise by its name."""
        for exercise in self.content.exercises:
            if exercise.name == name:
                return exercise
        names = ", ".join(exercise.name for exercise in self.content.exercises)
        raise Impossible(
            f"lab {self.name} has no exercise {name!r}",
            why=f"its exercises are: {names}",
            fix=f"muster lab check {self.name}",
        )

    def hint(self, mistake: str) -> Hint:
        """Return the text about a mistake, of this lab or of any."""
        return self.content.hints.get(mistake) or general_hints()[mistake]

    def solution(self) -> str:
        """Return the reference solution."""
        return without_gaps((self.folder / "solution.py").read_text(encoding="utf-8"))

    def starter(self) -> str:
        """Return the starter: the solution with gaps."""
        return with_gaps((self.folder / "solution.py").read_text(encoding="utf-8"))


def lesson(name: str) -> Lesson:
    """Return a lab by its name."""
    if name not in NAMES:
        raise Impossible(
            f"unknown lab {name!r}",
            why=f"the labs are: {', '.join(NAMES)}",
            fix="muster lab list",
        )
    return Lesson(name)


def general_hints() -> dict[str, Hint]:
    """Return the texts about mistakes that can occur in any exercise."""
    text = (_HERE / "hints.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Hint])


def with_gaps(solution: str) -> str:
    """Return a solution whose marked parts are gaps that raise NotImplementedError."""
    lines: list[str] = []
    inside = False
    for line in solution.splitlines():
        if line.strip() == _BEGIN:
            indent = line.removesuffix(_BEGIN)
            lines += [f"{indent}# YOUR CODE HERE", f'{indent}raise NotImplementedError("a gap")']
            inside = True
        elif line.strip() == _END:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


def without_gaps(solution: str) -> str:
    """Return a solution without the marks."""
    lines = [line for line in solution.splitlines() if line.strip() not in (_BEGIN, _END)]
    return "\n".join(lines) + "\n"
