"""Every lab: the starter scores nothing, the solution everything, each planted mistake its own word."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import msgspec
import pytest
from ruamel.yaml import YAML

from nightly import nightly_except
from torchmuster.labs import grading, workspace
from torchmuster.labs import lesson as course
from torchmuster.labs.grading import Verdict
from torchmuster.labs.lesson import GENERAL_HINTS, Lesson

pytestmark = pytest.mark.ranks

MISTAKES = Path(__file__).parent / "lab_mistakes"
# For what hangs on purpose; who comes after the first has three tenths of it, also on a machine that has much to do.
DEADLINE_S = 70.0


class Planted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mistake, planted in a solution."""

    exercise: str
    mistake: str
    old: str
    new: str


def planted_in(lesson: Lesson) -> list[Planted]:
    text = (MISTAKES / f"{lesson.module}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(YAML(typ="safe").load(text), list[Planted])


def with_mistake(lesson: Lesson, planted: Planted) -> str:
    solution = lesson.solution()
    assert solution.count(planted.old) == 1, f"{planted.mistake}: {planted.old!r}"
    return solution.replace(planted.old, planted.new)


@pytest.fixture(autouse=True)
def end_the_server() -> Iterator[None]:
    """End the process from which ranks were forked, unless other tests use it, too."""
    is_shared = forkserver._forkserver._forkserver_pid is not None
    yield
    if not is_shared:
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


@pytest.mark.parametrize(
    "name", nightly_except(["communication"], {name: name for name in course.NAMES})
)
def test_starter_solution_and_every_planted_mistake(name: str, tmp_path: Path) -> None:
    lesson = course.lesson(name)
    everything = [exercise.name for exercise in lesson.exercises]

    def grade(text: str, exercises: list[str]) -> tuple[Verdict, ...]:
        file = tmp_path / f"{lesson.module}.py"
        file.write_text(text, encoding="utf-8")
        return grading.grade(lesson, file, exercises, deadline_s=DEADLINE_S)

    solution = grade(lesson.solution(), everything)
    assert list(solution) == [Verdict(exercise=exercise) for exercise in everything]
    assert grading.points(lesson, solution) == lesson.points
    starter = grade(lesson.solution(gaps=True), everything)
    assert [verdict.mistake for verdict in starter] == ["not-done"] * len(everything)
    wrong = []
    for planted in planted_in(lesson):
        (verdict,) = grade(with_mistake(lesson, planted), [planted.exercise])
        if verdict.mistake != planted.mistake:
            wrong.append((planted.mistake, verdict))
    assert not wrong


def test_every_hint_is_planted_and_names_belong_to_one_lab() -> None:
    general = set(tomllib.loads(GENERAL_HINTS.read_text()))
    own: list[str] = []
    everywhere: set[str] = set()
    for name in course.NAMES:
        lab = course.lesson(name)
        planted = {planted.mistake for planted in planted_in(lab)}
        hints = set(lab.hints) - general
        assert hints == planted - general
        own += hints
        everywhere |= planted
    assert len(own) == len(set(own)) >= 100
    assert general - {"not-done"} <= everywhere


def test_pytest_runs_the_tests_of_a_lab(tmp_path: Path) -> None:
    lab = workspace.start_lab(course.lesson("gpu-basics"), tmp_path)
    mistaken = lab.lesson.solution().replace("2 * size**3", "size**3")
    lab.file.write_text(mistaken)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/"]
    done = subprocess.run(command, cwd=lab.path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "half of the operations are missing" in done.stdout
    assert "1 failed, 3 passed" in done.stdout
