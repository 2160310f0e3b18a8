"""A function is called when a module is imported, and the module does not notice."""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torchmuster.integrations.import_hooks import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "module_of_somebody"
    (tmp_path / f"{name}.py").write_text("NUMBER = 1\n\n\ndef f():\n    return NUMBER\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_called_once_with_the_finished_module(module: str) -> None:
    seen: list[ModuleType] = []
    when_imported(module, seen.append)
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [imported]
    assert imported.NUMBER == 1
    importlib.import_module(module)
    assert seen == [imported]


def test_the_module_keeps_its_own_loader(module: str) -> None:
    when_imported(module, lambda _: None)
    imported = importlib.import_module(module)
    assert type(imported.__loader__).__name__ == "SourceFileLoader"
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
    assert "return NUMBER" in inspect.getsource(imported.f)


def test_called_at_once_for_a_module_that_is_there() -> None:
    seen: list[ModuleType] = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_errors_of_the_function_do_not_reach_the_import(module: str) -> None:
    def fail(_: ModuleType) -> None:
        raise ValueError("ours")

    when_imported(module, fail)
    assert importlib.import_module(module).NUMBER == 1
