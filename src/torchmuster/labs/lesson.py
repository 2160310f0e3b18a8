"""The parts of a lab; without torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchmuster.errors import Impossible

# Marks of a gap: the learner writes the lines between them.
_BEGIN, _END = "# solution", "# end of solution"


class Word(NamedTuple):
    """The text about a mistake: what is wrong, its effect, how to fix it."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """An exercise. Graded on ``ranks`` ranks, with a process group unless ``joined`` is false."""

    name: str
    title: str
    points: int
    ranks: int = 2
    joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A lab: exercises, texts about mistakes, questions of the report."""

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    words: Mapping[str, Word]
    questions: tuple[str, ...]
    on_gpus: str
    counts: bool = False  # towards the 100 points of the course

    @property
    def points(self) -> int:
        """The points of the lab."""
        return sum(exercise.points for exercise in self.exercises)

    @property
    def module(self) -> str:
        """The lab's module name: its folder here, and the learner's file without ``.py``."""
        return self.name.replace("-", "_")

    @property
    def file(self) -> str:
        """The name of the learner's file."""
        return f"{self.module}.py"

    def exercise(self, name: str) -> Exercise:
        """Return one exercise by its name."""
        match = next((exercise for exercise in self.exercises if exercise.name == name), None)
        if match is None:
            raise Impossible(
                f"lab {self.name} has no exercise {name!r}",
                why=f"its exercises are: {', '.join(exercise.name for exercise in self.exercises)}",
                fix=f"muster lab check {self.name}",
            )
        return match

    def reading(self) -> str:
        """Return the reading."""
        return (_here(self) / "reading.md").read_text(encoding="utf-8")

    def solution(self) -> str:
        """Return the reference solution."""
        return without_gaps((_here(self) / "solution.py").read_text(encoding="utf-8"))

    def starter(self) -> str:
        """Return the starter: the solution with gaps."""
        return with_gaps((_here(self) / "solution.py").read_text(encoding="utf-8"))


def _here(lesson: Lesson) -> Path:
    return Path(__file__).parent / "lessons" / lesson.module


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


# Mistakes that can occur in any exercise.
ANYWHERE: Mapping[str, Word] = {
    "not-done": Word(
        "not done yet",
        "a gap of the starter was reached",
        "replace it with your code; see reading.md next to the file",
    ),
    "missing": Word(
        "a required name is missing",
        "the check uses the name from the starter",
        "define it again with its original name and argument order",
    ),
    "raised": Word(
        "your code raised an error",
        "the last line of the traceback is the error; the line of your file shows where it occurred",
        "fix the reported error; for more details, call the function from your own script",
    ),
    "ended": Word(
        "your code exited the process",
        "it called sys.exit, exit or quit; the other ranks would wait for this one forever",
        "raise an error instead, or return",
    ),
    "died": Word(
        "the process died",
        "no error was raised: the process was killed, ran out of memory, or called os._exit",
        "do not exit or kill the process in your code",
    ),
    "hangs": Word(
        "your code hangs",
        "usually one rank waits in a collective that another rank never calls",
        "make the same collective calls in the same order on all ranks",
    ),
    "wrong-value": Word(
        "the result is wrong",
        "the line below compares it with the result of plain PyTorch",
        "compute the same example by hand",
    ),
}


# Each is the module ``lesson`` of a folder in ``lessons/``, imported on use.
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
# Of the 100 points of the labs from gpu-basics to pipeline.
TO_PASS = 70


def lesson(name: str) -> Lesson:
    """Return a lab by its name."""
    if name not in NAMES:
        raise Impossible(
            f"unknown lab {name!r}",
            why=f"the labs are: {', '.join(NAMES)}",
            fix="muster lab list",
        )
    module = importlib.import_module(f"torchmuster.labs.lessons.{name.replace('-', '_')}.lesson")
    lesson: Lesson = module.LESSON
    return lesson


def lessons() -> list[Lesson]:
    """Return all labs."""
    return [lesson(name) for name in NAMES]
