"""Things of the user's that settings name: ``module:function``."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible


def find(name: str, setting: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the working folder is looked in first."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise Impossible(
            f"{setting} is {name!r}, which is not module:function",
            why="it names a function of yours: the module with dots, a colon, the function",
            fix=f"{setting}: my_project.{setting.rpartition('.')[2]}:make",
        )
    module = _module(module_name, name, setting)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [one for one, value in vars(module).items() if _is_own(value, module_name)]
            raise Impossible(
                f"{setting} is {name!r}, but {module_name} has no {attribute!r}",
                why=f"{module.__file__} defines: {', '.join(known) or 'no functions'}",
                fix="check the name after the colon",
            )
        found = getattr(found, part)
    if not callable(found):
        raise Impossible(
            f"{setting} is {name!r}, which is no function but {type(found).__name__}",
            why="it is called without arguments when the run starts",
            fix=f"def {attribute}(): return …",
        )
    return found  # type: ignore[no-any-return]


def call(name: str, setting: str) -> Any:
    """Call the function that ``module:function`` names, without arguments; None is no answer."""
    function = find(name, setting)
    needed = _needed(function)
    if needed:
        raise Impossible(
            f"{name} ({setting}) needs arguments: {', '.join(needed)}",
            why="it is called without arguments when the run starts",
            fix="give them defaults, or name a function without arguments that calls it",
        )
    try:
        made = function()
    except Exception as error:  # the user's own error keeps its traceback, and says who called
        error.add_note(f"{setting} is {name}: it is called without arguments when the run starts")
        raise
    if made is None:
        raise Impossible(
            f"{name} ({setting}) returned None",
            why="what it returns is what is used",
            fix=f"end {name.partition(':')[2]} with: return …",
        )
    return made


def _module(module_name: str, name: str, setting: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            error.add_note(_while_importing(name, setting))  # what *it* imports is missing
            raise
        raise Impossible(
            f"{setting} is {name!r}, but there is no module {error.name!r}",
            why=f"it is neither in {folder} nor installed for {sys.executable}",
            fix="run from the folder that has it; a module is written with dots and without .py",
        ) from error
    except Exception as error:
        error.add_note(_while_importing(name, setting))
        raise


def _while_importing(name: str, setting: str) -> str:
    return f"{setting} is {name}: its module was found, and failed while Python ran it"


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty and one.kind not in optional
    ]


def _is_own(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name
