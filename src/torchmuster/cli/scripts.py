"""The script that a command runs: a file, a module or a program, with its own arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli.options import NO_PYTHON
from torchmuster.errors import Impossible

MODULE = ("-m", "--module")
MAIN = "__main__.py"  # makes a folder a script, as for python


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
        if len(command) == 1:
            raise Impossible("there is no module after -m", fix="muster run -m package.module")
        return Script(command=tuple(command[1:]), module=True)
    if command[0] == NO_PYTHON:
        return Script(command=tuple(command[1:]), program=True)
    path = folder / command[0]
    if not path.is_file() and not (path / MAIN).is_file():
        fix = "check the name; flags of muster come before the script, its own after it; lists have commas: --hosts a,b"
        if (folder / f"{command[0]}.py").is_file():
            fix = f"muster run {command[0]}.py"
        raise Impossible(
            f"there is no script {command[0]!r}",
            why=f"{path} is neither a file nor a folder with {MAIN}",
            fix=fix,
        )
    return Script(command=tuple(command))
