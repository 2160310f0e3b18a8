"""Whether Python imports the packages that were installed, and not others of the same name."""

import os
import shlex
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_MODULES = ("torch", "numpy")


def _imports(surroundings: Surroundings) -> Iterator[Finding]:
    found = [
        finding
        for module in _MODULES
        for finding in (*_beside(module, surroundings), *_twice(module, surroundings))
    ]
    yield from found
    if not found:
        folder = installed.torch_folder(surroundings)
        words = f"packages in {folder.parent}" if folder else "packages in Python's search path"
        yield Finding(name="python-imports", status=Status.OK, what=words)


def _beside(module: str, surroundings: Surroundings) -> Iterator[Finding]:
    """Yield a file or folder in the working folder that shadows a module."""
    mine = installed.importable(module, surroundings.folder)
    real = installed.copies(module, surroundings)
    if mine is None or (real and mine.resolve() == real[0].resolve()):
        return
    moved = mine.with_name(f"my_{mine.name}")
    fix = f"mv {shlex.quote(str(mine))} {shlex.quote(str(moved))}"
    if (mine / "csrc").is_dir():
        fix = "cd ..  # this is the source of torch itself; work in another folder"
    yield finding(
        "module-shadowed:script", mine=mine, module=module, folder=surroundings.folder, fix=fix
    )


def _twice(module: str, surroundings: Surroundings) -> Iterator[Finding]:
    """Yield a module that is installed twice in different versions."""
    found = installed.copies(module, surroundings)
    if len(found) < 2 or found[0].is_file() or found[0].resolve() == found[1].resolve():
        return
    taken, other = found[:2]
    versions = [_version(module, place) for place in (taken, other)]
    if versions[0] == versions[1]:
        return
    variable = surroundings.environment.get("PYTHONPATH", "")
    listed = [Path(part).resolve() for part in variable.split(os.pathsep) if part]
    status = Status.WARNING
    if taken.parent.resolve() in listed:
        why, fix = "PYTHONPATH puts its folder first", "unset PYTHONPATH"
    elif (Path(surroundings.environment.get("HOME", "~")) / ".local") in taken.parents:
        why = "packages installed with --user come before system packages"
        fix = "export PYTHONNOUSERSITE=1"
    elif (environment := _virtual_environment(taken)) and environment not in other.parents:
        status, fix = Status.NOTE, ""
        why = "the virtual environment's copy comes first, as intended"
    else:
        why = "its folder comes first in Python's search path"
        fix = f"{surroundings.python} -m pip uninstall {module}  # repeat until one is left"
    yield finding(
        "module-twice",
        status=status,
        module=module,
        versions=versions[0],
        parent=taken.parent,
        other_version=versions[1],
        other_folder=other.parent,
        why=why,
        fix=fix,
    )


def _virtual_environment(place: Path) -> Path | None:
    return next((parent for parent in place.parents if (parent / "pyvenv.cfg").is_file()), None)


def _version(module: str, place: Path) -> str:
    for package in distributions(name=module, path=[str(place.parent)]):
        return package.version
    return "an unknown version"


CHECKS = (
    Check(
        name="python-imports",
        asks="Does Python import the installed packages, and not others of the same name?",
        run=_imports,
    ),
)
