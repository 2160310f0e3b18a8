"""Call a function when a module is imported, without importing it."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], None]
_wanted: dict[str, list[OnImport]] = {}


def when_imported(name: str, call: OnImport) -> None:
    """Call a function with a module once it is imported; at once if it already is.

    Errors of the function never reach the script.
    """
    if (module := sys.modules.get(name)) is not None:
        with contextlib.suppress(Exception):
            call(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _wanted.setdefault(name, []).append(call)


class _Finder(MetaPathFinder):
    """Finds only modules with a registered function, using the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _wanted:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None:
                spec.loader = _Notifier(spec.loader)
            return spec
        return None


class _Notifier(Loader):
    """Loads a module with its own loader, which it restores, and then calls the registered functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for call in _wanted.pop(module.__name__, ()):
            with contextlib.suppress(Exception):
                call(module)
