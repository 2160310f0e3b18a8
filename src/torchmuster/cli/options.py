"""Commands and their flags as typed dataclasses: argparse is generated from them, and ``run`` gets the filled object.

A field is a flag: ``num_gpus`` is ``--num-gpus``, and its help, parser and spellings are declared with
:func:`flag`; a field that is declared with :func:`argument` is positional. Groups of flags that several
commands share are base classes. Other fields are not flags; the command line fills them in another way.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchmuster.runfolder import DEFAULT_ROOT
from torchmuster.units import parse_seconds

FLAG = "flag"
# Before a program that is no Python code, as ``-m`` is before a module.
NO_PYTHON = "--no-python"
MOST_PROCESSES = 4096
# --wait without a duration: 10 years, because infinity cannot be sent as JSON.
FOREVER_S = 10 * 365 * 86400.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FlagInfo:
    """How a flag or an argument is typed and described; ``parse`` raises ValueError."""

    help: str
    parse: Callable[[str], object] = str
    metavar: str | None = None
    group: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    # The value of a flag that is typed without one. Its value then needs "=": --wait=10m.
    alone: object = None
    # Values follow until the next flag. Only for commands that take no script.
    many: bool = False
    repeated: bool = False
    positional: bool = False
    # The setting that the flag overrides.
    setting: str = ""
    required: bool = False

    @property
    def takes_value(self) -> bool:
        """Return whether a value follows, as a separate argument."""
        return self.alone is None and not self.many


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, or an action of one: its flags, what it does with them, and its help."""

    # Of an action; those of the commands are in main.py, which imports a command on use.
    summary: str = ""
    options: type | None = None
    run: Callable[[Any], int] | None = None
    usage: str | None = None
    # Below the summary, in the command's own help.
    more: str = ""
    examples: Sequence[str] = ()
    actions: Mapping[str, "Command"] = field(default_factory=dict)

    def __call__(self, options: Any) -> int:
        """Run the command with its options and return the exit code."""
        assert self.run is not None
        return self.run(options)


def command(options: type[T], **help_texts: Any) -> Callable[[Callable[[T], int]], Command]:
    """Declare a function as a command with these flags; ``help_texts`` are fields of :class:`Command`."""

    def declare(run: Callable[[T], int]) -> Command:
        return Command(options=options, run=run, **help_texts)

    return declare


def flag(help: str, *, default: Any = None, **info: Any) -> Any:  # noqa: A002  # argparse's name
    """Declare a flag.

    False is a switch; everything else takes a value.
    """
    return field(default=default, metadata={FLAG: FlagInfo(help=help, **info)})


def argument(help: str, *, default: Any = None, **info: Any) -> Any:  # noqa: A002  # argparse's name
    """Declare a positional argument, which may be left out unless it is ``required``."""
    return flag(help, default=default, positional=True, **info)


def count(text: str) -> int:
    """Parse a number of processes, hosts or repetitions."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= MOST_PROCESSES:
        raise ValueError(f"{text!r} is not a number from 1 to {MOST_PROCESSES}")
    return number


def names(text: str) -> tuple[str, ...]:
    """Parse a comma list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def wait_time(text: str) -> float:
    """Parse how long to wait for GPUs."""
    return FOREVER_S if text == "forever" else parse_seconds(text)


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """The flag of every command that prints a report."""

    json: bool = flag("print JSON", default=False)


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """The folder that contains the run folders."""

    runs: Path = flag(
        "folder that contains the run folders (default: runs)",
        default=DEFAULT_ROOT,
        parse=Path,
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class WhichRunOptions(RunsOptions):
    """A run, in the folder of the runs."""

    which: str | None = argument(
        "a run's id, a unique part of it, its folder, or: last (default: the active run, else the newest)",
        metavar="RUN",
    )


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """A script with its arguments, which follow the flags."""

    # As typed: a file, or -m and a module, or --no-python and a program.
    script: tuple[str, ...] = ()


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Add the flags and arguments of a dataclass to a parser."""
    groups: dict[str, Any] = {"": parser}
    for option in dataclasses.fields(options):
        info = option.metadata.get(FLAG)
        if info is None:
            continue
        if info.group not in groups:
            groups[info.group] = parser.add_argument_group(info.group)
        _add_flag(groups[info.group], option, info)


def _add_flag(group: Any, option: "dataclasses.Field[Any]", info: FlagInfo) -> None:
    name = f"--{option.name.replace('_', '-')}"
    if option.default is False:
        group.add_argument(name, *info.aliases, action="store_true", help=info.help)
        return
    details: dict[str, Any] = {
        "type": _argparse_type(info.parse),
        "default": option.default,
        "metavar": info.metavar,
        "choices": info.choices,
    }
    if info.repeated:
        details |= {"action": "append", "default": None}
    elif info.many:
        details["nargs"] = "*" if info.positional else "+"
    elif info.alone is not None:
        details |= {"nargs": "?", "const": info.alone}
    if info.positional:
        if not info.required and not info.many:
            details["nargs"] = "?"
        group.add_argument(option.name, help=info.help, **details)
        return
    group.add_argument(name, help=info.help, required=info.required, **details)
    del details["default"]
    for alias in info.aliases:
        group.add_argument(
            alias, help=argparse.SUPPRESS, dest=option.name, default=argparse.SUPPRESS, **details
        )


def _argparse_type(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return the parser with its message as argparse's error."""

    def typed(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def read_options(options: type[T], parsed: argparse.Namespace, **filled: object) -> T:
    """Return the typed options of a parsed command line."""
    values = dict(filled)
    for option in dataclasses.fields(options):  # type: ignore[arg-type]  # a dataclass
        info = option.metadata.get(FLAG)
        if info is None:
            continue
        value = getattr(parsed, option.name)
        if info.repeated:
            value = tuple(value or ())
        elif info.many and value is not None:
            value = ",".join(value) if info.setting else tuple(value)
        values[option.name] = value
    return options(**values)


def split_command_line(command: Command, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into its own and the script with the script's arguments.

    Own are flags, their values and the names of actions, as in ``gpus --json pick``. The script is the first
    other argument, or what follows ``-m`` (with it) or ``--``. Each value is joined to its flag (``--name=x``), so
    that it may begin with a dash. A command without a script keeps all its arguments.
    """
    takes_script = command.options is not None and issubclass(command.options, ScriptOptions)
    if not takes_script and not command.actions:
        return list(arguments), []
    infos = _flags_with_values(command.options)
    own: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest[0]
        if word in command.actions:
            action_own, script = split_command_line(command.actions[word], rest[1:])
            return [*own, word, *action_own], script
        if word == "--" and takes_script:
            return own, rest[1:]
        if takes_script and (not word.startswith("-") or word in ("-m", "--module", NO_PYTHON)):
            return own, rest
        rest = rest[1:]
        info = infos.get(word)
        if info is not None and info.takes_value and rest:
            word = f"{word}={rest.pop(0)}"
        own.append(word)
    return own, rest


def _flags_with_values(options: type | None) -> dict[str, FlagInfo]:
    """Return what is known of each spelling of a flag that is no switch."""
    infos = {}
    for option in () if options is None else dataclasses.fields(options):
        info = option.metadata.get(FLAG)
        if info is None or option.default is False:
            continue
        for name in (f"--{option.name.replace('_', '-')}", *info.aliases):
            infos[name] = info
    return infos
