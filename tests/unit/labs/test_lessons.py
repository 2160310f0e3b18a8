"""What holds for every lab, and how a starter is cut from a solution; no torch."""

import ast

import pytest

from torchmuster.errors import Impossible
from torchmuster.labs import lesson as course
from torchmuster.labs.lesson import Lesson, general_hints, with_gaps, without_gaps

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
    assert with_gaps(SOLUTION) == (
        "def double(number: int) -> int:\n"
        '    """Return twice the number."""\n'
        "    # YOUR CODE HERE\n"
        '    raise NotImplementedError("a gap")\n'
        "\n\n"
        "def use() -> int:\n"
        "    return double(2)\n"
    )
    assert "# solution" not in without_gaps(SOLUTION)
    assert "return 2 * number" in without_gaps(SOLUTION)


@pytest.mark.parametrize("name", course.NAMES)
def test_every_lab_is_whole(name: str) -> None:
    lesson = course.lesson(name)
    exercises = lesson.content.exercises
    assert lesson.starter().count("# YOUR CODE HERE") >= len(exercises)
    for text in (lesson.starter(), lesson.solution()):
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
    assert not set(lesson.content.hints) & set(general_hints())


@pytest.mark.parametrize("name", course.NAMES)
def test_every_hint_says_what_why_and_what_to_do(name: str) -> None:
    for mistake, hint in course.lesson(name).content.hints.items():
        for part in (hint.what, hint.why, hint.fix):
            assert part.strip(), mistake
            assert not part.endswith("."), mistake


def test_the_course_gives_the_points_that_were_promised() -> None:
    labs = [Lesson(name) for name in course.NAMES]
    counted = {lab.name: lab.points for lab in labs if lab.content.counts}
    assert counted == {
        "gpu-basics": 20,
        "mixed-precision": 20,
        "distributed": 25,
        "memory": 20,
        "pipeline": 15,
    }
    assert sum(counted.values()) == 100
    assert course.TO_PASS == 70
    assert {lab.points for lab in labs if not lab.content.counts} == {20}


def test_an_unknown_lab_or_exercise_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Impossible) as unknown:
        course.lesson("dpp")
    assert "'dpp'" in unknown.value.what
    assert "communication, ddp," in unknown.value.why
    with pytest.raises(Impossible) as unknown:
        course.lesson("ddp").exercise("train")
    assert "'train'" in unknown.value.what
    assert "dataloader, " in unknown.value.why
