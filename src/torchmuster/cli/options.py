"""Flags as typed dataclasses: argparse is generated from them, and a command gets the filled object.

A field is a flag: ``num_gpus`` is ``--num-gpus``, and its help, parser and spellings are declared with
:func:`flag`. Groups of flags that several commands share are base classes. A field without :func:`flag`
is not a flag; the command line fills it in another way.
"""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchmuster.config.layers import Flag
from torchmuster.launch.job import NodeCounts, parse_nodes
from torchmuster.runfolder import DEFAULT_ROOT
from torchmuster.units import parse_seconds

FLAG = "flag"
MOST_PROCESSES = 4096
SHORTEST_LIMIT_S = 10.0
# --wait without a duration: 10 years, because infinity cannot be sent as JSON.
FOREVER_S = 10 * 365 * 86400.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FlagInfo:
    """How a flag is typed and described."""

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
    # The setting that the flag overrides.
    setting: str = ""
    required: bool = False

    @property
    def takes_value(self) -> bool:
        """Return whether a value follows, as a separate argument."""
        return self.alone is None and not self.many


def flag(help: str, *, default: Any = None, **info: Any) -> Any:  # noqa: A002  # argparse's name
    """Declare a flag.

    False is a switch; everything else takes a value.
    """
    metadata = {FLAG: FlagInfo(help=help, **info)}
    return dataclasses.field(default=default, metadata=metadata)


def count(text: str) -> int:
    """Parse a number of processes, hosts or repetitions."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_PROCESSES}")
    return number


def duration(text: str) -> float:
    """Parse a duration, such as 30s, 10m or 2h, into seconds."""
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not math.isfinite(seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration")
    return seconds


def arguments(text: str) -> tuple[str, ...]:
    """Parse arguments as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).lower()}") from None


def names(text: str) -> tuple[str, ...]:
    """Parse a comma list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _some_arguments(text: str) -> tuple[str, ...]:
    parsed = arguments(text)
    if not parsed:
        raise argparse.ArgumentTypeError("no arguments; for example: '--resume_from {path}'")
    return parsed


def _time_limit(text: str) -> float:
    seconds = duration(text)
    if seconds < SHORTEST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is too short; write at least 10s")
    return seconds


def _wait(text: str) -> float:
    return FOREVER_S if text == "forever" else duration(text)


def _nodes(text: str) -> NodeCounts:
    from torchmuster.errors import Impossible

    try:
        return parse_nodes(text)
    except Impossible as error:
        raise argparse.ArgumentTypeError(f"{error.what}; {error.why}") from None


def _setting(text: str) -> Flag:
    path, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE; write for example model.torch_dtype=bfloat16"
        )
    # The value is not part of its source: it may be secret.
    return Flag(flag=f"--set {path}", path=path.strip(), text=value)


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
class SettingOptions:
    """The flags of every command that takes settings."""

    config: Path | None = flag("settings file (YAML)", parse=Path, metavar="FILE")
    num_gpus: str | None = flag("use N GPUs", setting="distributed.num_gpus", metavar="N")
    gpu_ids: str | None = flag(
        "use these GPUs: indices or UUIDs, as in 0,2", setting="distributed.gpu_ids", metavar="IDS"
    )
    set: tuple[Flag, ...] = flag(
        "set any setting, for example --set launch.grace=60s",
        default=(),
        repeated=True,
        parse=_setting,
        metavar="KEY=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(SettingOptions):
    """The devices and the environment of the ranks on each host."""

    device: Literal["auto", "gpu", "cpu"] = flag(
        "auto (default): GPUs if there are any, else the CPU",
        default="auto",
        choices=("auto", "gpu", "cpu"),
        group="devices and environment",
    )
    ranks: int | None = flag(
        "processes per host (default: one per GPU, or 1 on the CPU)",
        parse=count,
        metavar="N",
        aliases=("--nproc-per-node", "--nproc_per_node"),
        group="devices and environment",
    )
    share: bool = flag(
        "allow GPUs that are already in use", default=False, group="devices and environment"
    )
    wait: float = flag(
        "if GPUs are in use, wait in line for them: without limit, or for at most --wait=10m",
        default=0.0,
        parse=_wait,
        metavar="DURATION",
        alone=FOREVER_S,
        group="devices and environment",
    )
    env: tuple[str, ...] = flag(
        "set a variable on all ranks; NAME alone forwards its current value",
        default=(),
        repeated=True,
        metavar="NAME[=VALUE]",
        group="devices and environment",
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions(DeviceOptions, RunsOptions, JsonOptions):
    """The hosts: over ssh or from Slurm."""

    # The arguments after muster, up to the script.
    words: tuple[str, ...] = ()

    hosts: tuple[str, ...] | None = flag(
        setting="launch.hosts",
        help="hosts by their ssh names, rank 0's host first: a,b:4,c (4 ranks on b)",
        parse=names,
        metavar="HOSTS",
        group="multiple hosts",
    )
    nodes: NodeCounts | None = flag(
        "number of hosts without spares; with 2:4, the run continues on 2 if others are lost",
        parse=_nodes,
        metavar="N",
        aliases=("--nnodes",),
        group="multiple hosts",
    )
    slurm: bool = flag(
        "submit this command as a Slurm job, and follow the job",
        default=False,
        group="multiple hosts",
    )
    sbatch: tuple[str, ...] | None = flag(
        "arguments of sbatch: '-p gpu --gpus-per-node=8 --time=12:00:00'",
        parse=arguments,
        metavar="'ARGS'",
        group="multiple hosts",
    )


@dataclass(frozen=True, kw_only=True)
class JoinOptions(HostOptions):
    """Hosts that join with a code."""

    join: bool = flag(
        "print a code with which other machines join (muster join), without ssh; --nodes N counts "
        "this one, too (default: 2)",
        default=False,
        group="multiple hosts",
    )


@dataclass(frozen=True, kw_only=True)
class RunControl(HostOptions):
    """The name and folder of a run, when it restarts, and when it stops."""

    spares: str | None = flag(
        setting="launch.spares",
        help="use the last N hosts as hot spares: they wait, and replace hosts that fail (default: 0)",
        metavar="N",
        group="multiple hosts",
    )
    max_restarts: str | None = flag(
        setting="launch.max_restarts",
        help="restart all ranks after a failure, at most N times without a newer checkpoint",
        metavar="N",
        aliases=("--max_restarts",),
        group="run control",
    )
    time_limit: float | None = flag(
        "save a checkpoint and stop when the ranks have run for DURATION",
        parse=_time_limit,
        metavar="DURATION",
        group="run control",
    )
    webhook: str | None = flag(
        "POST a JSON object to this URL when the run starts, fails and ends (Slack can show it)",
        metavar="URL",
        group="run control",
    )
    name: str | None = flag("name the run (default: the script's name)", group="run control")
    detach: bool = flag("run in the background", default=False, group="run control")
    dry_run: bool = flag("show what would be started, and exit", default=False, group="run control")
    json: bool = flag("with --dry-run: print JSON", default=False, group="run control")


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """How a script of the user resumes."""

    resume_with: tuple[str, ...] = flag(
        "on a restart, add ARGS to the script's arguments; {path} is the newest complete checkpoint",
        default=(),
        parse=_some_arguments,
        metavar="ARGS",
        group="run control",
    )


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """A script with its arguments, which follow the flags."""

    # As typed: a file, or -m and a module, or --no-python and a program.
    script: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunControl, JoinOptions, ResumeOptions, ScriptOptions):
    """The flags of ``muster run``."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunControl):
    """The flags of ``muster train``."""

    gpu_ids: str | None = flag(
        "use these GPUs: indices or UUIDs, as in 0,2",
        setting="distributed.gpu_ids",
        metavar="ID",
        many=True,
    )
    resume: str | None = flag(
        "resume a run (its id, its folder, or: last) from its newest good checkpoint", metavar="RUN"
    )
    check: bool = flag(
        "check the hosts and their connections first", default=False, group="run control"
    )
    plan: bool = flag(
        "plan for this machine, train with the plan, and report its accuracy after step 3",
        default=False,
        group="run control",
    )


def add_options(parser: argparse.ArgumentParser, options: type[T], run: Callable[[T], int]) -> None:
    """Add the flags of a dataclass to the parser of a command; ``run`` gets the filled object."""
    parser.set_defaults(run=run, options_type=options)
    add_flags(parser, options)


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Add the flags of a dataclass to a parser."""
    groups: dict[str, Any] = {"": parser}
    for field in dataclasses.fields(options):
        info = field.metadata.get(FLAG)
        if info is None:
            continue
        if info.group not in groups:
            groups[info.group] = parser.add_argument_group(info.group)
        _add_flag(groups[info.group], field, info)


def _add_flag(group: Any, field: "dataclasses.Field[Any]", info: FlagInfo) -> None:
    name = f"--{field.name.replace('_', '-')}"
    if field.default is False:
        group.add_argument(name, action="store_true", help=info.help)
        return
    details: dict[str, Any] = {
        "type": info.parse,
        "default": field.default,
        "metavar": info.metavar,
        "choices": info.choices,
    }
    if info.repeated:
        details |= {"action": "append", "default": None}
    elif info.many:
        details["nargs"] = "+"
    elif info.alone is not None:
        details |= {"nargs": "?", "const": info.alone}
    group.add_argument(name, help=info.help, required=info.required, **details)
    del details["default"]
    for alias in info.aliases:
        group.add_argument(
            alias, help=argparse.SUPPRESS, dest=field.name, default=argparse.SUPPRESS, **details
        )


def read_options(options: type[T], parsed: argparse.Namespace, **filled: object) -> T:
    """Return the typed options of a parsed command line."""
    values = dict(filled)
    for field in dataclasses.fields(options):  # type: ignore[arg-type]  # a dataclass
        info = field.metadata.get(FLAG)
        if info is None:
            continue
        value = getattr(parsed, field.name)
        if info.many and value is not None:
            value = ",".join(value)
        elif info.repeated:
            value = tuple(value or ())
        values[field.name] = value
    return options(**values)


def split_at_script(words: Sequence[str], options: type) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into its flags and the script with its own arguments.

    The script is the first argument that is neither a flag nor the value of a flag, or what follows ``-m``
    (with it) or ``--``. Each value is joined to its flag (``--name=x``), so that it may begin with a dash.
    """
    infos = {}
    for field in dataclasses.fields(options):
        if FLAG in field.metadata and field.default is not False:
            info = field.metadata[FLAG]
            for name in (f"--{field.name.replace('_', '-')}", *info.aliases):
                infos[name] = info
    own: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--":
            return own, rest[1:]
        if not word.startswith("-") or word in ("-m", "--module", NO_PYTHON):
            return own, rest
        rest = rest[1:]
        info = infos.get(word)
        if info is None:
            own.append(word)
        elif not info.takes_value:
            own.append(f"{word}=forever")
        elif rest:
            own.append(f"{word}={rest.pop(0)}")
        else:
            own.append(word)  # argparse says that its value is missing
    return own, rest


# Before a program that is no Python code, as ``-m`` is before a module.
NO_PYTHON = "--no-python"
