"""The script that a command runs: a file, a module or a program, with its own arguments."""

import importlib.machinery
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli.options import NO_PYTHON
from torchmuster.errors import Impossible

MODULE = ("-m", "--module")
# A flag of muster run that people also type after the script.
STARTS_NOTHING = "--dry-run"


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script to run: a file, a module or (``program``) a program that is no Python code, and its arguments."""

    command: tuple[str, ...]
    module: bool = False
    program: bool = False

    @property
    def name(self) -> str:
        """The default name of its runs."""
        first = self.command[0]
        return first.rpartition(".")[2] if self.module else Path(first).stem


def script_of(command: Sequence[str], folder: Path) -> Script:
    """Return the script of a command line after checking that it exists on this machine."""
    if not command:
        raise Impossible(
            "there is no script to run",
            why="a script is a file, or a module after -m",
            fix="muster run train.py",
        )
    if command[0] in MODULE:
        return Script(command=_module(command[1:], folder), module=True)
    if command[0] == NO_PYTHON:
        return Script(command=tuple(command[1:]), program=True)
    path = folder / command[0]
    if path.is_dir():
        raise Impossible(
            f"{command[0]!r} is a folder, not a script",
            why="Muster runs a single file, as python does",
            fix=f"give the file in it: muster run {Path(command[0]) / 'train.py'}",
        )
    if not path.is_file():
        fix = "check the name; flags of muster come before the script, its own after it; lists have commas: --hosts a,b"
        if (folder / f"{command[0]}.py").is_file():
            fix = f"muster run {command[0]}.py"
        raise Impossible(
            f"there is no script {command[0]!r}", why=f"{path} does not exist", fix=fix
        )
    _refuse_dry_run(command, path)
    return Script(command=tuple(command))


def _refuse_dry_run(command: Sequence[str], path: Path) -> None:
    """Refuse ``--dry-run`` after a script that does not mention it: nothing was to be started."""
    if STARTS_NOTHING not in command:
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if STARTS_NOTHING not in text and "dry_run" not in text:
        raise Impossible(
            f"--dry-run is after {command[0]}, so it belongs to the script",
            why=f"flags of muster come before the script; {command[0]} does not mention --dry-run",
            fix=f"muster run --dry-run … {command[0]} …",
        )


def _module(command: Sequence[str], folder: Path) -> tuple[str, ...]:
    if not command:
        raise Impossible("there is no module after -m", fix="muster run -m package.module")
    # Only the first part: to check more, Python would have to run the package's code.
    package = command[0].partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(package, [str(folder)])
    if here is None and (not package or importlib.util.find_spec(package) is None):
        raise Impossible(
            f"there is no module {command[0]!r}",
            why=f"{package!r} is neither in {folder} nor installed for this Python",
            fix="check the name; write the module with dots, without .py: -m package.module",
        )
    return tuple(command)
