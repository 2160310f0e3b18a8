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
        "def wrong(): raise ValueError('no data')\n"
        "def two(a, b): pass\n"
        "number = 3\n"
    )
    (tmp_path / "broken_of_named.py").write_text("import not_there_at_all\n")
    yield tmp_path
    for name in ("mine_of_named", "broken_of_named"):
        sys.modules.pop(name, None)


def test_a_function_of_the_working_folder_is_called() -> None:
    assert factory.call_import("mine_of_named:make", "model.build") == 42
    assert factory.call_import("mine_of_named:Holder.make", "model.build") == "held"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("make", "No module named 'make'"),
        (":make", "':make'"),
        ("not_mine:make", "No module named 'not_mine'"),
        ("broken_of_named:make", "No module named 'not_there_at_all'"),
        ("mine_of_named:mak", "'mak'"),
    ],
)
def test_what_cannot_be_used_is_told(name: str, named: str) -> None:
    with pytest.raises(Impossible) as error:
        factory.call_import(name, "model.build")
    assert "model.build" in error.value.what
    assert named in f"{error.value.what} {error.value.why}"
    assert error.value.fix


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mine_of_named:wrong", ValueError),
        ("mine_of_named:two", TypeError),
        ("mine_of_named:number", TypeError),
    ],
)
def test_the_users_own_error_stays_and_says_who_called(name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as error:
        factory.call_import(name, "model.build")
    (note,) = error.value.__notes__
    assert note.startswith(f"model.build is {name}: ")
