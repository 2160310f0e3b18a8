"""Copies of the working folder, one for each trial, so that the user's own files are never changed.

Small files are copied, large files and folders are linked (writing to them is refused), and output folders start empty.
"""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_COPIED_BYTES = 16 * 2**20  # a larger file or folder is linked
_MOST_FILES = 2000  # of a folder
_LEFT_OUT = {
    *(".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", "wandb", "mlruns", "lightning_logs", "runs"),
}
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
    outputs: tuple[str, ...] = ()  # given by the user, or found; as the script gets them
    within: Path  # where the copies are made
    reports: Path  # the folder of all reports, which is not copied

    def copy(self, name: str) -> tuple[Path, tuple[str, ...]]:
        """Make a copy for a trial; return its folder, and the command with paths that fit it."""
        target = self.within / name
        outputs = {self._absolute(one) for one in self.all_outputs()}
        _copy_folder(self.folder, target, leave_out={*outputs, self.reports, self.within.parent})
        for one in outputs:
            if inside := _relative(one, self.folder):
                _make_output(target / inside, one)
        return target, self.fitted(target, self.command)

    def all_outputs(self) -> list[str]:
        """Return the output folders: those given, and values of arguments whose names say so."""
        return [
            *self.outputs,
            *(
                one
                for one in output_arguments(self.command[1:])
                if not self._absolute(one).is_file()
            ),
        ]

    def fitted(self, target: Path, command: Sequence[str]) -> tuple[str, ...]:
        """Return a command with absolute output folders inside the copy, and other paths as the user meant them."""
        outputs = {self._absolute(one) for one in self.all_outputs()}

        def fit(word: str) -> str:
            flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
            before = flag + equals
            if not value or value.startswith("-"):
                return word
            path = self._absolute(value)
            for one in outputs:
                rest = _relative(path, one)
                place = _relative(one, self.folder)
                if rest is not None and (Path(value).is_absolute() or place is None):
                    base = target / (place or f"outside{one}".replace("//", "/"))
                    _make_output(base, one)
                    return before + str(base / rest)
            if value.startswith("..") and path.exists():
                return before + str(path)
            return word

        first = command[0]
        if not self.module and _relative(self._absolute(first), self.folder) is None:
            first = str(self._absolute(first))
        elif not self.module:
            first = str(_relative(self._absolute(first), self.folder))
        return (first, *(fit(word) for word in command[1:]))

    def _absolute(self, path: str) -> Path:
        return Path(os.path.normpath(self.folder / path))


def output_arguments(words: Iterable[str]) -> list[str]:
    """Return the values of arguments such as ``--output_dir`` that name a folder for output."""
    found: list[str] = []
    name = ""
    for word in words:
        flag, equals, value = word.partition("=")
        key = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
        if (word.startswith("-") or equals) and _OUTPUT.fullmatch(key):
            name = "" if equals else key
            if equals and value:
                found.append(value)
        else:
            if name and not word.startswith("-"):
                found.append(word)
            name = ""
    return found


def _make_output(place: Path, named: Path) -> None:
    """Create an empty output folder; for a file, the folder that has it."""
    is_file = named.is_file() or (bool(named.suffix) and not named.is_dir())
    (place.parent if is_file else place).mkdir(parents=True, exist_ok=True)


def _relative(path: Path, folder: Path) -> Path | None:
    return path.relative_to(folder) if path.is_relative_to(folder) else None


def _copy_folder(source: Path, target: Path, leave_out: set[Path]) -> None:
    target.mkdir(parents=True)
    for entry in sorted(os.scandir(source), key=lambda one: one.name):
        path = Path(entry.path)
        if entry.name in _LEFT_OUT or path in leave_out:
            continue
        place = target / entry.name
        if entry.is_symlink():
            place.symlink_to(path.resolve())
        elif entry.is_dir():
            holds_output = any(one.is_relative_to(path) for one in leave_out)
            if not holds_output and _is_large(path):
                place.symlink_to(path)
            else:
                _copy_folder(path, place, leave_out)
        elif entry.is_file():
            if entry.stat().st_size > _MOST_COPIED_BYTES:
                place.symlink_to(path)
            else:
                shutil.copy2(path, place)


def _is_large(folder: Path) -> bool:
    """Return whether a folder has many files, or more data than is worth a copy."""
    files = size = 0
    for place, folders, names in os.walk(folder):
        files += len(names) + len(folders)
        if files > _MOST_FILES:
            return True
        size += sum(Path(place, name).lstat().st_size for name in names)
        if size > _MOST_COPIED_BYTES:
            return True
    return False
