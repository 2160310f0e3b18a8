"""Private names of torch that are missing: refused by name, with what they were for."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import ExitCode, Impossible
from torchmuster.torch_internals import PrivateName, exists, require


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that stands for torch; its name is ``library``."""
    (tmp_path / "library" / "_inner").mkdir(parents=True)
    (tmp_path / "library" / "__init__.py").write_text(
        "class Public:\n    _made_later: int\n    def _method(self): ...\n"
    )
    (tmp_path / "library" / "_inner" / "__init__.py").write_text("_here = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("library", "library._inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "library"


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("library._inner", True),
        ("library._inner._here", True),
        ("library.Public._method", True),
        ("library.Public._made_later", True),  # an attribute of instances
        ("library._gone", False),
        ("library._inner._gone", False),
        ("library.Public._gone", False),
        ("library._gone._here", False),
    ],
)
def test_a_name_is_looked_for_in_modules_classes_and_instances(
    library: str, name: str, there: bool
) -> None:
    assert exists(name) is there


def test_nothing_is_said_where_all_is_there_or_can_be_done_without(library: str) -> None:
    require(
        [
            PrivateName("library._inner._here", "compute"),
            PrivateName("library._gone", "be fast", without="slower"),
        ]
    )


def test_a_name_that_cannot_be_done_without_is_refused(
    library: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.99.0")
    names = [
        PrivateName("library._gone", "read the flight recorder"),
        PrivateName("library._inner._gone", "count operations"),
        PrivateName("library.Public._method", "compute"),
    ]
    with pytest.raises(Impossible) as refused:
        require(names)
    assert refused.value.exit_code == ExitCode.IMPOSSIBLE
    assert "library.Public._method" not in str(refused.value)
    assert str(refused.value) == snapshot
