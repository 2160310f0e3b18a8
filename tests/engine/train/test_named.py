"""Functions of the user's by name: found in the working folder, and every way not to be found has its text."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmuster.errors import Impossible
from torchmuster.train.models import factory

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_of_named.py").write_text(
        "import math\n"
        "class Holder:\n    @staticmethod\n    def make(): return 'held'\n"
        "def make(): return 42\n"
        "def nothing(): pass\n"
        "def wrong(): raise ValueError('no data')\n"
        "def two(a, b): pass\n"
        "number = 3\n"
    )
    (tmp_path / "broken_of_named.py").write_text("import not_there_at_all\n")
    (tmp_path / "syntax_of_named.py").write_text("def (:\n")
    yield tmp_path
    for name in ("mine_of_named", "broken_of_named", "syntax_of_named"):
        sys.modules.pop(name, None)


def test_a_function_of_the_working_folder_is_called() -> None:
    assert factory.call_import("mine_of_named:make", "model.build") == 42
    assert factory.call_import("mine_of_named:Holder.make", "model.build") == "held"


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("make", "model.build is 'make', which does not have the form module:function", "a colon"),
        (
            ":make",
            "model.build is ':make', which does not have the form module:function",
            "a colon",
        ),
        (
            "not_mine:make",
            "model.build is 'not_mine:make', but there is no module 'not_mine'",
            "it is neither in ",
        ),
        (
            "mine_of_named:mak",
            "model.build is 'mine_of_named:mak', but mine_of_named has no 'mak'",
            "defines: Holder, make, nothing, wrong, two",
        ),
        (
            "mine_of_named:number",
            "model.build is 'mine_of_named:number', which is not a function but int",
            "it is called without arguments",
        ),
        (
            "mine_of_named:two",
            "mine_of_named:two (model.build) needs arguments: a, b",
            "it is called without arguments when the run starts",
        ),
        (
            "mine_of_named:nothing",
            "mine_of_named:nothing (model.build) returned None",
            "its return value is used",
        ),
    ],
)
def test_what_cannot_be_used_is_told(name: str, what: str, why: str) -> None:
    with pytest.raises(Impossible) as error:
        factory.call_import(name, "model.build")
    assert error.value.what == what
    assert why in error.value.why
    assert error.value.fix


@pytest.mark.parametrize(
    ("name", "kind", "note"),
    [
        ("mine_of_named:wrong", ValueError, "it is called without arguments when the run starts"),
        ("broken_of_named:make", ModuleNotFoundError, "was found, but importing it failed"),
        ("syntax_of_named:make", SyntaxError, "was found, but importing it failed"),
    ],
)
def test_the_users_own_error_stays_and_says_who_called(
    name: str, kind: type[Exception], note: str
) -> None:
    with pytest.raises(kind) as error:
        factory.call_import(name, "model.build")
    (told,) = error.value.__notes__
    assert told.startswith(f"model.build is {name}: ")
    assert told.endswith(note)
