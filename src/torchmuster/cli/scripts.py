"""Command lines that end in a script: everything from the script on belongs to the script."""

import argparse
import importlib.machinery
import importlib.util
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.redaction import printable

# Flags whose value can be any text, also one that ends in .py.
_TAKE_A_TEXT = frozenset(
    {
        *("--address", "--config", "--env", "--html", "--image", "--name"),
        *(
            "--namespace",
            "--out",
            "--rdzv-endpoint",
            "--remote-python",
            "--resume-with",
        ),
        *("--num-gpus", "--webhook"),
        *("--runs", "--sbatch", "--set"),
    }
)


# Before a program that is no Python code, as ``-m`` is before a module.
NO_PYTHON = "--no-python"


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script to run: a file, a module or (``program``) a program that is no Python code, and its arguments."""

    command: tuple[str, ...]
    module: bool
    program: bool = False

    @property
    def name(self) -> str:
        """The default name of its runs."""
        word = self.command[0]
        return word.rpartition(".")[2] if self.module else Path(word).stem


# Flags of muster run that people also type after the script.
_MUSTERS = (
    *("--dry-run", "--help", "--json", "--detach", "--slurm", "--hosts", "--ranks", "--num-gpus"),
    *("--gpu-ids", "--max-restarts", "--share", "--wait", "--grace"),
)
_PARSERS = ("argparse", "ArgumentParser", "click", "typer", "fire", "tyro", "absl", "hydra")


def split_off(
    words: list[str],
    *,
    takes_text: Collection[str] = (),
    starts: Callable[[str], bool] = lambda _: False,
) -> tuple[list[str], list[str] | None]:
    """Split a command line at the script: after ``--``, at ``-m`` or at a ``.py`` file.

    ``takes_text`` are more flags whose value is no script; ``starts`` says which other words, such
    as ``torchrun``, begin a command.
    """
    for place, word in enumerate(words):
        if word == "--":
            return words[:place], words[place + 1 :]
        before = words[place - 1].replace("_", "-") if place else ""
        if before in _TAKE_A_TEXT or before in takes_text:
            continue
        if word in ("-m", "--module"):
            return words[:place], ["-m", *words[place + 1 :]]
        if not word.startswith("-") and (word.endswith(".py") or starts(word)):
            return words[:place], words[place:]
    return words, None


_TAKE_A_FLAG = ("--resume-with", "--sbatch", "--batch-arg", "--accumulation-arg")


def with_joined_values(words: list[str]) -> list[str]:
    """Join flags with their values where argparse would misunderstand them.

    ``--resume-with --flag``: argparse would take the value for a flag of muster. ``--wait train.sh``:
    the value of ``--wait`` begins with a digit.
    """
    joined: list[str] = []
    for word in words:
        last = joined[-1] if joined else ""
        if last in _TAKE_A_FLAG or (last == "--wait" and word[:1].isdecimal()):
            joined[-1] += f"={word}"
            continue
        if last == "--wait":
            joined[-1] = "--wait=forever"
        joined.append(word)
    return joined


def without_musters_flags(
    command: Sequence[str], words: Sequence[str], folder: Path
) -> tuple[list[str], str]:
    """Return the script's command, and a note about flags of muster after the script.

    Those belong to the script. ``--dry-run`` is refused unless the script mentions it or it follows
    ``--``: people who type it do not want to start anything.
    """
    place = 2 if command[0] in ("-m", NO_PYTHON) else 1
    arguments = list(command[place:])
    dashes = next(
        (n for n, one in enumerate(arguments[1:]) if arguments[n] == "--" and one in _MUSTERS), None
    )
    if dashes is not None:
        return [*command[:place], *arguments[:dashes], *arguments[dashes + 1 :]], ""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    text = _script_text(command, folder)
    found = [one for one in own if one.partition("=")[0] in _MUSTERS and not _mentions(text, one)]
    if not found:
        return list(command), ""
    script = command[place - 1]
    if "--dry-run" in found:
        left = [*command[:place], *(one for one in arguments if one != "--dry-run")]
        raise Impossible(
            f"--dry-run is after {script}, so it belongs to the script",
            why="flags of muster come before the script"
            + (f"; {script} does not mention --dry-run" if text else ""),
            fix=f"muster {printable([*words, '--dry-run', *left])}  # to pass it to the script: "
            f"muster {printable([*words, *left])} -- --dry-run",
        )
    flags = shlex.join(found)
    verb = "is" if len(found) == 1 else "are"
    return list(
        command
    ), f"{flags} {verb} passed to {script}; flags of muster come before the script"


def _script_text(command: Sequence[str], folder: Path) -> str:
    try:
        return (folder / command[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:  # a module
        return ""


def _mentions(text: str, word: str) -> bool:
    """Return whether the script's text has a flag: as such, as a field, or by its parser's help."""
    flag = word.partition("=")[0]
    field = flag[2:].replace("-", "_")
    if flag == "--help":
        return any(one in text for one in _PARSERS)
    return flag in text or ("_" in field and field in text)


def script_from(options: argparse.Namespace, folder: Path) -> Script:
    """Return the script of a command line after checking that it exists on this machine."""
    words = list(options.command or [])
    if stray := getattr(options, "stray", []):
        raise _not_a_script(stray[0], folder)
    if words[:1] == ["-m"]:
        return Script(command=_module(words[1:], folder), module=True)
    if words[:1] == [NO_PYTHON]:
        return Script(command=tuple(words[1:]), module=False, program=True)
    if not words:
        raise Impossible(
            "there is no script to run",
            why="a script is a file whose name ends in .py, or a module after -m",
            fix="muster run train.py  # a file with another suffix goes after --",
        )
    if (folder / words[0]).is_dir():
        raise Impossible(
            f"{words[0]!r} is a folder, not a script",
            why="Muster runs a single file, as python does",
            fix=f"give the file in it: muster run {Path(words[0]) / 'train.py'}",
        )
    if not (folder / words[0]).is_file():
        raise Impossible(
            f"there is no script {words[0]!r}",
            why=f"{folder / words[0]} does not exist",
            fix="check the name; flags of muster come before the script, its own after it",
        )
    return Script(command=tuple(words), module=False)


def _not_a_script(word: str, folder: Path) -> Impossible:
    if (folder / f"{word}.py").is_file():
        fix = f"muster run {word}.py"
    elif (folder / word).is_file():
        fix = f"muster run -- {word}"
    else:
        fix = "muster run train.py  # flags of muster come before the script, its own after it"
    return Impossible(
        f"{word!r} is not a script",
        why="a script is a file whose name ends in .py, a module after -m, or any file after --",
        fix=fix,
    )


def _module(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    if not words:
        raise Impossible("there is no module after -m", fix="muster run -m package.module")
    # Only the first part: to check more, Python would have to run the package's code.
    package = words[0].partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(package, [str(folder)])
    if here is None and (not package or importlib.util.find_spec(package) is None):
        raise Impossible(
            f"there is no module {words[0]!r}",
            why=f"{package!r} is neither in {folder} nor installed for this Python",
            fix="check the name; write the module with dots, without .py: -m package.module",
        )
    return tuple(words)
