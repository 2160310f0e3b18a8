"""The labs in their order, and what must be reached."""

import importlib

from torchmuster.errors import Impossible
from torchmuster.labs.lesson import Lesson

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
