"""Whether Python imports the packages that were installed, and not others of the same name."""

import shlex
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_MODULES = ("torch", "numpy")


def _imports(surroundings: Surroundings) -> Iterator[Finding]:
    found: list[Finding] = []
    for module in _MODULES:
        found += _beside(module, surroundings)
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


CHECKS = (
    Check(
        name="python-imports",
        asks="Does Python import the installed packages, and not others of the same name?",
        run=_imports,
    ),
)
