"""What a lab is made of, in words that need no torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchmuster.errors import Impossible

# The mark of a gap: what follows it in the solution, to ``_END``, is what the learner writes.
_BEGIN, _END = "# solution", "# end of solution"


class Word(NamedTuple):
    """What is said about a mistake: what is wrong, what comes of it, what mends it."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """Something to write. Graded on ``ranks`` ranks; unless ``joined`` is false they have a process group."""

    name: str
    title: str
    points: int
    ranks: int = 2
    joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A lab: what is to be written, what can be told about mistakes in it, what its report asks."""

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    words: Mapping[str, Word]
    questions: tuple[str, ...]
    on_gpus: str
    measured_on: int = 1  # ranks that the report's measurements take
    measured_joined: bool = True  # else the learner's code forms their group
    counts: bool = False  # towards the hundred points of the course

    @property
    def points(self) -> int:
        """How many points the lab gives."""
        return sum(one.points for one in self.exercises)

    @property
    def module(self) -> str:
        """The lab's name as Python writes it: its folder here, and the learner's file without ``.py``."""
        return self.name.replace("-", "_")

    @property
    def file(self) -> str:
        """What the learner's file is called."""
        return f"{self.module}.py"

    def exercise(self, name: str) -> Exercise:
        """Return one exercise by its name."""
        found = next((one for one in self.exercises if one.name == name), None)
        if found is None:
            raise Impossible(
                f"lab {self.name} has no exercise {name!r}",
                why=f"its exercises are: {', '.join(one.name for one in self.exercises)}",
                fix=f"muster lab check {self.name}",
            )
        return found

    def reading(self) -> str:
        """Return what is read first."""
        return (_here(self) / "reading.md").read_text(encoding="utf-8")

    def solution(self) -> str:
        """Return the reference solution."""
        return without_gaps((_here(self) / "solution.py").read_text(encoding="utf-8"))

    def starter(self) -> str:
        """Return the solution with its gaps open."""
        return with_gaps((_here(self) / "solution.py").read_text(encoding="utf-8"))


def _here(lesson: Lesson) -> Path:
    return Path(__file__).parent / "lessons" / lesson.module


def with_gaps(solution: str) -> str:
    """Return a solution in which each marked part is a gap, which says so when it is run."""
    kept: list[str] = []
    inside = False
    for line in solution.splitlines():
        if line.strip() == _BEGIN:
            indent = line.removesuffix(_BEGIN)
            kept += [f"{indent}# YOUR CODE HERE", f'{indent}raise NotImplementedError("a gap")']
            inside = True
        elif line.strip() == _END:
            inside = False
        elif not inside:
            kept.append(line)
    return "\n".join(kept) + "\n"


def without_gaps(solution: str) -> str:
    """Return a solution without the marks."""
    kept = [line for line in solution.splitlines() if line.strip() not in (_BEGIN, _END)]
    return "\n".join(kept) + "\n"


# Mistakes that can be made in any exercise.
ANYWHERE: Mapping[str, Word] = {
    "not-done": Word(
        "not done yet",
        "a gap of the starter was reached",
        "replace it by code of yours; the reading beside the file says how",
    ),
    "missing": Word(
        "a name that the exercise is about is gone",
        "it is looked for by the name that the starter gives it",
        "write it again under its name, with its arguments in their order",
    ),
    "raised": Word(
        "your code raised an error",
        "it is the last line of the traceback that says what, the line of your file where",
        "mend what the error names; to see more, call the function from a script of your own",
    ),
    "ended": Word(
        "your code ended the process",
        "sys.exit, exit or quit was called; the other ranks would wait for this one for ever",
        "raise an error instead, or return",
    ),
    "died": Word(
        "the process died",
        "nothing was raised: it was killed, ran out of memory, or called os._exit",
        "leave the end of the process to whoever started it",
    ),
    "hangs": Word(
        "your code does not come to an end",
        "mostly one rank waits in a collective that another one never calls",
        "let all ranks make the same collective calls in the same order, whatever their rank",
    ),
    "wrong-value": Word(
        "the result is wrong",
        "the line below compares it with what plain PyTorch gives",
        "try the same example by hand, on paper if need be",
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
# Of the hundred points that the labs from gpu-basics to pipeline give together.
TO_PASS = 70


def lesson(name: str) -> Lesson:
    """Return a lab by its name."""
    if name not in NAMES:
        raise Impossible(
            f"there is no lab {name!r}",
            why=f"the labs are: {', '.join(NAMES)}",
            fix="muster lab list",
        )
    module = importlib.import_module(f"torchmuster.labs.lessons.{name.replace('-', '_')}.lesson")
    found: Lesson = module.LESSON
    return found


def lessons() -> list[Lesson]:
    """Return all labs."""
    return [lesson(name) for name in NAMES]
