"""Every lab: the starter scores nothing, the solution everything, each planted mistake its own word."""

from pathlib import Path

import msgspec
import pytest
from ruamel.yaml import YAML

from nightly import nightly_except
from torchmuster.labs import grading
from torchmuster.labs import lesson as course
from torchmuster.labs.grading import Paper, Verdict
from torchmuster.labs.lesson import ANYWHERE, Lesson

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


@pytest.mark.parametrize(
    "name", nightly_except(["communication"], {name: name for name in course.NAMES})
)
def test_starter_solution_and_every_planted_mistake(name: str, tmp_path: Path) -> None:
    lesson = course.lesson(name)
    everything = tuple(one.name for one in lesson.exercises)
    planted = planted_in(lesson)
    files = [(lesson.starter(), everything), (lesson.solution(), everything)]
    files += [(with_mistake(lesson, one), (one.exercise,)) for one in planted]
    papers = []
    for place, (text, exercises) in enumerate(files):
        file = tmp_path / str(place) / lesson.file
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        papers.append(Paper(file=str(file), exercises=exercises))

    starter, solution, *others = grading.grade_paper(lesson, papers, deadline_s=DEADLINE_S)

    assert list(solution) == [Verdict(exercise=one) for one in everything]
    assert grading.points(lesson, solution) == lesson.points
    assert [one.mistake for one in starter] == ["not-done"] * len(everything)
    found = [
        (one.exercise, one.mistake, one.seen)
        for one, wanted in zip([verdict for (verdict,) in others], planted, strict=True)
        if one.mistake != wanted.mistake
    ]
    wanted = [
        (one.exercise, one.mistake)
        for one, (verdict,) in zip(planted, others, strict=True)
        if verdict.mistake != one.mistake
    ]
    assert not found, f"wanted {wanted}"


def test_every_word_is_planted_and_names_belong_to_one_lab() -> None:
    words = [word for lesson in course.lessons() for word in lesson.words]
    assert len(words) == len(set(words)) >= 40
    for lesson in course.lessons():
        assert set(lesson.words) == {one.mistake for one in planted_in(lesson)} - set(ANYWHERE)
    everywhere = {one.mistake for lesson in course.lessons() for one in planted_in(lesson)}
    assert set(ANYWHERE) - {"not-done"} <= everywhere
