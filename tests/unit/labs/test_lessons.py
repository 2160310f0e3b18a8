"""What holds for every lab, and how a starter is cut from a solution; no torch."""

import ast
import tomllib

import pytest

from torchmuster.errors import Impossible
from torchmuster.labs import lesson as course
from torchmuster.labs.lesson import GENERAL_HINTS, without_marks

SOLUTION = '''\
def double(number: int) -> int:
    """Return twice the number."""
    # solution
    return 2 * number
    # end of solution


def use() -> int:
    return double(2)
'''


def test_a_starter_is_the_solution_with_its_gaps_open() -> None:
    assert without_marks(SOLUTION, gaps=True) == (
        "def double(number: int) -> int:\n"
        '    """Return twice the number."""\n'
        "    # YOUR CODE HERE\n"
        '    raise NotImplementedError("a gap")\n'
        "\n\n"
        "def use() -> int:\n"
        "    return double(2)\n"
    )
    whole = without_marks(SOLUTION, gaps=False)
    assert "# solution" not in whole
    assert "return 2 * number" in whole


@pytest.mark.parametrize("name", course.NAMES)
def test_every_lab_is_whole(name: str) -> None:
    lesson = course.lesson(name)
    exercises = lesson.exercises
    starter = lesson.solution(gaps=True)
    assert starter.count("# YOUR CODE HERE") >= len(exercises)
    for text in (starter, lesson.solution()):
        ast.parse(text)
        assert "# solution" not in text
        assert "# end of solution" not in text
    reading = (lesson.folder / "README.md").read_text()
    for part in (
        "## What to do",
        "## What differs on GPUs",
        f"muster lab check {name}",
        "pytest tests/",
        "```\n",
    ):
        assert part in reading
    assert (lesson.folder / "answers.md").read_text().count("## ") >= 3
    tests = lesson.tests.read_text()
    assert [f"def test_{exercise.name}(" in tests for exercise in exercises] == [True] * len(
        exercises
    )
    own = tomllib.loads((lesson.folder / "lab.toml").read_text())["hints"]
    assert not set(own) & set(tomllib.loads(GENERAL_HINTS.read_text()))


@pytest.mark.parametrize("name", course.NAMES)
def test_every_hint_says_what_why_and_what_to_do(name: str) -> None:
    for mistake, hint in course.lesson(name).hints.items():
        for part in (hint.what, hint.why, hint.fix):
            assert part.strip(), mistake
            assert not part.endswith("."), mistake


def test_the_course_gives_the_points_that_were_promised() -> None:
    labs = [course.lesson(name) for name in course.NAMES]
    counted = {lab.name: lab.points for lab in labs if lab.counts}
    assert counted == {
        "gpu-basics": 20,
        "mixed-precision": 20,
        "distributed": 25,
        "memory": 20,
        "pipeline": 15,
    }
    assert sum(counted.values()) == 100
    assert course.TO_PASS == 70
    assert {lab.points for lab in labs if not lab.counts} == {20}


def test_an_unknown_lab_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Impossible) as unknown:
        course.lesson("dpp")
    assert "'dpp'" in unknown.value.what
    assert "communication, ddp," in unknown.value.why
