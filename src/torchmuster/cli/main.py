"""Entry point: import the module of the command, run it, convert errors to exit codes."""

import argparse
import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from torchmuster import __version__
from torchmuster.cli import output
from torchmuster.cli.options import Command, add_flags, read_options, split_command_line
from torchmuster.errors import ExitCode, MusterError
from torchmuster.runfolder import NO_ROOM

# Each has a module of its name, whose `run` has its flags, its help and what it does.
GROUPS = {
    "Run": {
        "run": "start a script on one or more hosts",
        "train": "train a model from a settings file",
        "join": "join a run that another machine hosts",
        "runs": "list runs and their state",
        "logs": "show or follow the output of a run",
        "stop": "stop a run on all its hosts",
    },
    "Trouble": {
        "explain": "report what happened to a run, why, and how to fix it",
        "hang": "name the rank that keeps a hanging torchrun job waiting",
        "watch": "monitor a run live, with alerts",
    },
    "Before a run": {
        "gpus": "show the GPUs of this machine; pick free ones",
        "doctor": "check this machine; explain an error",
        "check": "check whether hosts can train together",
        "plan": "predict whether a model fits, how to split it, and its speed",
        "config": "write, show and check settings files",
        "lab": "learn with labs: tests, solutions and reports",
    },
    "Quality and speed": {
        "prove": "show that a training script resumes and scales correctly",
        "checkpoint": "list, verify and export checkpoints",
        "profile": "find where training time goes and what to change",
        "bench": "benchmark this machine; compare results",
    },
    "Clusters": {
        "kubernetes": "print a script as a Kubernetes Job",
        "exporter": "serve metrics of this machine and its runs to Prometheus",
    },
}
SUMMARIES = {name: text for commands in GROUPS.values() for name, text in commands.items()}
COMMANDS = (*SUMMARIES, "completion")
EXAMPLES = (
    "muster gpus                                   who is using which GPU",
    "muster run --num-gpus 2 train.py --lr 1e-4    a torchrun script on two free GPUs",
    "muster run --hosts a,b:4 train.py             on two hosts, over ssh",
)
EXIT_CODES = (
    "Exit codes: 0 good, 1 failed, 2 cannot work here, 3 in use (--wait), 75 saved (rerun to resume), "
    "130 Ctrl-C, 137 and 143 stopped"
)


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps examples unwrapped and has a wide column for flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=96)
        self._action_max_length = 14  # argparse ignores the indent of subcommands


class RootParser(argparse.ArgumentParser):
    """The parser of ``muster``: its help lists the commands in groups."""

    def format_help(self) -> str:
        """Return the help."""
        lines = [
            "usage: muster COMMAND …    (muster COMMAND --help explains a command)",
            "Launch, check, plan and watch distributed PyTorch training.",
        ]
        for group, commands in GROUPS.items():
            lines += ["", f"{group}:"]
            lines += [f"  {name:<12}{summary}" for name, summary in commands.items()]
        lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES), "", EXIT_CODES]
        return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output.replace_what_cannot_be_shown()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    code = int(ExitCode.GOOD)
    try:
        code = _run_command(typed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has exited
        _forget_output()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise  # a bug: show the traceback
        _forget_output()
        output.say(f"failure  cannot write the output: {error.strerror or error}")
        return ExitCode.FAILED
    return code


def command_of(name: str) -> Command:
    """Import a command."""
    command: Command = importlib.import_module(f"torchmuster.cli.{name}").run
    return command


def _run_command(typed: Sequence[str]) -> int:
    name = typed[0] if typed else ""
    if name not in COMMANDS:
        if name and not name.startswith("-"):
            from torchmuster.config.fields import suggest_name

            hint = suggest_name(name, COMMANDS) or "muster --help lists the commands"
            root_parser(only="").error(f"there is no command {name!r}; {hint}")
        root_parser(only="").parse_args(typed)
        root_parser(only="").print_help()
        return ExitCode.IMPOSSIBLE
    own, script = split_command_line(command_of(name), typed[1:])
    own = [name, *own]
    parsed, unknown = root_parser(only=name).parse_known_args(own)
    if unknown:
        # The error is that of the command, with its usage.
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command: Command = parsed.command
    if command.options is None or command.run is None:
        parsed.parser.print_help()  # muster lab: the help says what is missing
        return ExitCode.IMPOSSIBLE
    filled = {"command_line": tuple(own), "script": tuple(script)}
    names = {option.name for option in dataclasses.fields(command.options)}
    needed = {name: value for name, value in filled.items() if name in names}
    options: Any = read_options(command.options, parsed, **needed)
    try:
        return int(command.run(options))
    except MusterError as error:
        output.show_error(error, as_json=getattr(options, "json", False))
        return error.exit_code


def _forget_output() -> None:
    """Redirect stdout to the null device, so that Python does not retry the write on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def root_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with ``only``, import only that command's module."""
    parser = RootParser(prog="muster", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    parser.set_defaults(parser=parser, command=None)
    parts = parser.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name in COMMANDS:
        if only is None or name == only:
            _add_command(parts, name, command_of(name))
    return parser


def _add_command(
    parts: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: Command
) -> None:
    summary = command.summary or SUMMARIES.get(name, "print a shell's completion script")
    sentence = f"{summary[0].upper()}{summary[1:]}."
    parser = parts.add_parser(
        name,
        help=summary,
        description=f"{sentence}\n{inspect.cleandoc(command.more)}".rstrip(),
        epilog="\n  ".join(["examples:", *command.examples]) if command.examples else None,
        formatter_class=HelpFormat,
        usage=command.usage,
        allow_abbrev=False,  # flags may be forwarded, so they must be unambiguous
    )
    parser.set_defaults(parser=parser, command=command)
    if command.options is not None:
        add_flags(parser, command.options)
    if command.actions:
        actions = parser.add_subparsers(title="actions", metavar="ACTION")
        for action, details in command.actions.items():
            _add_command(actions, action, details)
