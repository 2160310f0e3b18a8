"""Copies of the working folder, one for each trial, so that the user's own files are never changed.

Small files are copied, large files and folders are linked (writing to them is refused), and output folders start empty.
"""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MOST_COPIED_BYTES = 16 * 2**20  # a larger file or folder is linked
_MOST_FILES = 2000  # of a folder
_LEFT_OUT = (
    ".git",
    ".hg",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
)
# Folders in which trackers and muster write one folder for each run, and what such a folder has or is called.
_RUNS = ("lightning_logs", "mlruns", "runs", "wandb")
_OF_A_RUN = ("*/job.json", "*/events.out.tfevents.*", "*/meta.yaml", "version_*", "*run-*")
# Arguments of scripts that name a folder for what they write.
_OUTPUT = re.compile(
    r"(output|out|save|checkpoints?|ckpts?|log|logs|logging|run|work|results?|exp|experiment|project|default_root)"
    r"(_?(dir|folder|path|root))|out(put)?s?|logdir|workdir|outdir|savedir|runs?_folder"
)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """How a script's folder and arguments map to a trial's copy of them."""

    folder: Path  # of the user
    command: tuple[str, ...]
    module: bool
    outputs: tuple[str, ...] = ()  # given by the user, as the script gets them
    within: Path  # where the copies are made
    reports: Path  # the folder of all reports, which is not copied

    def copy(self, name: str) -> Path:
        """Make a copy for a trial, with empty output folders; return its folder."""
        target = self.within / name
        outputs = self._output_paths()
        _copy_folder(self.folder, target, leave_out={*outputs, self.reports, self.within.parent})
        for output in outputs:
            if output.is_relative_to(self.folder):
                _make_output(target / output.relative_to(self.folder), output)
        return target

    def command_in(self, target: Path) -> tuple[str, ...]:
        """Return the command with absolute output folders inside a copy, and other paths as the user meant them."""
        script = self.command[0]
        if not self.module:
            path = self._absolute(script)
            script = str(path)
            if path.is_relative_to(self.folder):
                script = str(path.relative_to(self.folder))
        return (script, *(self._fitted(argument, target) for argument in self.command[1:]))

    def _fitted(self, argument: str, target: Path) -> str:
        flag, equals, value = "", "", argument
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
        if not value or value.startswith("-"):
            return argument
        path = self._absolute(value)
        for output in self._output_paths():
            is_inside = output.is_relative_to(self.folder)
            if path.is_relative_to(output) and (Path(value).is_absolute() or not is_inside):
                copy = target / f"outside{output}"
                if is_inside:
                    copy = target / output.relative_to(self.folder)
                _make_output(copy, output)
                return f"{flag}{equals}{copy / path.relative_to(output)}"
        if value.startswith("..") and path.exists():
            return f"{flag}{equals}{path}"
        return argument

    def _output_paths(self) -> set[Path]:
        """Return the outputs: those given, and folders in arguments whose names say so."""
        paths = {self._absolute(output) for output in self.outputs}
        for value in output_arguments(self.command[1:]):
            path = self._absolute(value)
            if not path.is_file():  # a file is a checkpoint to begin with
                paths.add(path)
        return paths

    def _absolute(self, path: str) -> Path:
        return Path(os.path.normpath(self.folder / path))


def output_arguments(arguments: Iterable[str]) -> list[str]:
    """Return the values of arguments such as ``--output_dir`` that name a folder for output."""
    values: list[str] = []
    is_value = False  # of the flag before
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        key = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
        names_output = (argument.startswith("-") or equals) and _OUTPUT.fullmatch(key)
        if names_output and value:
            values.append(value)
        elif is_value and not names_output and not argument.startswith("-"):
            values.append(argument)
        is_value = bool(names_output) and not equals
    return values


def _make_output(copy: Path, original: Path) -> None:
    """Create an empty output folder; for a file, the folder that has it."""
    is_file = original.is_file() or (bool(original.suffix) and not original.is_dir())
    folder = copy
    if is_file:
        folder = copy.parent
    folder.mkdir(parents=True, exist_ok=True)


def _copy_folder(source: Path, target: Path, leave_out: set[Path]) -> None:
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        copy = target / path.name
        if path.name in _LEFT_OUT or path in leave_out or _has_runs(path):
            continue
        if path.is_symlink():
            copy.symlink_to(path.resolve())
        elif path.is_dir() and (
            any(other.is_relative_to(path) for other in leave_out) or not _is_large(path)
        ):
            _copy_folder(path, copy, leave_out)
        elif path.is_file() and path.stat().st_size <= _MOST_COPIED_BYTES:
            shutil.copy2(path, copy)
        elif path.is_dir() or path.is_file():  # too large for a copy
            copy.symlink_to(path)


def _has_runs(folder: Path) -> bool:
    """Return whether a folder is for runs, and not a source or data folder of the same name."""
    if folder.name not in _RUNS:
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _OF_A_RUN)


def _is_large(folder: Path) -> bool:
    """Return whether a folder has many files, or more data than is worth a copy."""
    size = 0
    for files, path in enumerate(folder.rglob("*")):
        size += path.lstat().st_size
        if files > _MOST_FILES or size > _MOST_COPIED_BYTES:
            return True
    return False
