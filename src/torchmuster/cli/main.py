"""Entry point: import the module of the subcommand, run it, convert errors to exit codes."""

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchmuster import __version__
from torchmuster.cli import output, parsers
from torchmuster.cli.options import ScriptOptions, read_options, split_at_script
from torchmuster.errors import EXIT_CODE_MEANINGS, ExitCode, MusterError
from torchmuster.runfolder import NO_ROOM


@dataclass(frozen=True)
class Command:
    """A subcommand: its module, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "gpus": Command("torchmuster.cli.gpus", "show the GPUs of this machine; pick free ones"),
    "doctor": Command("torchmuster.cli.doctor", "check this machine; explain an error"),
    "check": Command("torchmuster.cli.check", "check whether hosts can train together"),
    "plan": Command(
        "torchmuster.cli.plan", "predict whether a model fits, how to split it, and its speed"
    ),
    "bench": Command("torchmuster.cli.bench", "benchmark this machine; compare results"),
    "profile": Command(
        "torchmuster.cli.profile", "find where training time goes and what to change"
    ),
    "prove": Command(
        "torchmuster.cli.prove", "show that a training script resumes and scales correctly"
    ),
    "train": Command("torchmuster.cli.train", "train a model from a settings file"),
    "run": Command("torchmuster.cli.run", "start a script on one or more hosts"),
    "join": Command("torchmuster.cli.join", "join a run that another machine hosts"),
    "kubernetes": Command("torchmuster.cli.kubernetes", "print a script as a Kubernetes Job"),
    "explain": Command(
        "torchmuster.cli.explain", "report what happened to a run, why, and how to fix it"
    ),
    "hang": Command(
        "torchmuster.cli.hang", "name the rank that keeps a hanging torchrun job waiting"
    ),
    "checkpoint": Command("torchmuster.cli.checkpoint", "list, verify and export checkpoints"),
    "watch": Command("torchmuster.cli.watch", "monitor a run live, with alerts"),
    "exporter": Command(
        "torchmuster.cli.exporter", "serve metrics of this machine and its runs to Prometheus"
    ),
    "runs": Command("torchmuster.cli.runs", "list runs and their state"),
    "logs": Command("torchmuster.cli.logs", "show or follow the output of a run"),
    "stop": Command("torchmuster.cli.stop", "stop a run on all its hosts"),
    "lab": Command("torchmuster.cli.lab", "learn with labs: tests, solutions and reports"),
    "config": Command("torchmuster.cli.config", "write, show and check settings files"),
    "completion": Command("torchmuster.cli.completion", "print a shell's completion script"),
}

GROUPS = {
    "Run": ("run", "train", "join", "runs", "logs", "stop"),
    "Trouble": ("explain", "hang", "watch"),
    "Before a run": ("gpus", "doctor", "check", "plan", "config", "lab"),
    "Quality and speed": ("prove", "checkpoint", "profile", "bench"),
    "Clusters": ("kubernetes", "exporter"),
}
EXAMPLES = (
    "muster gpus                                   who is using which GPU",
    "muster run --num-gpus 2 train.py --lr 1e-4    a torchrun script on two free GPUs",
    "muster run --hosts a,b:4 train.py             on two hosts, over ssh",
    "muster config check config.yaml               all mistakes in a settings file, with lines",
)


class RootParser(argparse.ArgumentParser):
    """The parser of ``muster``: its help lists the commands in groups."""

    def format_help(self) -> str:
        """Return the help."""
        lines = [
            "usage: muster COMMAND …    (muster COMMAND --help explains a command)",
            "",
            "Launch, check, plan and watch distributed PyTorch training.",
        ]
        for group, names in GROUPS.items():
            lines += ["", f"{group}:"]
            lines += [f"  {name:<12}{COMMANDS[name].summary}" for name in names]
        lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES), "", "Exit codes:"]
        lines += [f"  {code.value:<5}{text}" for code, text in EXIT_CODE_MEANINGS.items()]
        return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output.replace_what_cannot_be_shown()
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = int(ExitCode.GOOD)
    try:
        try:
            code = _run_command(words)
        except MusterError as error:
            code = error.exit_code
            output.show_error(error, as_json="--json" in _own_words(words))
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


def _run_command(words: Sequence[str]) -> int:
    name = words[0] if words and words[0] in COMMANDS else ""
    if words and not name and not words[0].startswith("-"):
        from torchmuster.config.fields import suggest_name

        hint = suggest_name(words[0], COMMANDS) or "muster --help lists the commands"
        root_parser(only="").error(f"there is no command {words[0]!r}; {hint}")
    module = importlib.import_module(COMMANDS[name].module) if name else None
    options_type = getattr(module, "OPTIONS", None)
    own = list(words)
    script: list[str] = []
    if options_type is not None and issubclass(options_type, ScriptOptions):
        own, script = split_at_script(words[1:], options_type)
        own.insert(0, name)
    command = None
    if options_type is None and "--" in own:  # muster gpus pick -- command
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    parser = root_parser(only=name)
    parsed, unknown = parser.parse_known_args(own)
    if unknown:
        flags = parsed.incomplete._option_string_actions
        # The error is that of the subcommand, with its usage.
        parsed.incomplete.error(
            f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, flags)}"
        )
    if not hasattr(parsed, "run"):  # muster, or muster lab: the help says what is missing
        parsed.incomplete.print_help()
        return ExitCode.IMPOSSIBLE
    if command is not None:
        if not hasattr(parsed, "command"):
            parsed.incomplete.error("this command does not take a command after --")
        parsed.command = command
    if not hasattr(parsed, "options_type"):
        return int(parsed.run(parsed))
    filled = {"words": tuple(own), "script": tuple(script)}
    names = {field.name for field in dataclasses.fields(parsed.options_type)}
    needed = {name: value for name, value in filled.items() if name in names}
    return int(parsed.run(read_options(parsed.options_type, parsed, **needed)))


def _own_words(words: Sequence[str]) -> list[str]:
    """Return the arguments that are not of a script."""
    name = words[0] if words and words[0] in COMMANDS else ""
    options_type = None
    if name:
        options_type = getattr(importlib.import_module(COMMANDS[name].module), "OPTIONS", None)
    if options_type is None or not issubclass(options_type, ScriptOptions):
        return list(words)
    return split_at_script(words[1:], options_type)[0]


def _forget_output() -> None:
    """Redirect stdout to the null device, so that Python does not retry the write on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def root_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with ``only``, import only that subcommand's module."""
    parser = RootParser(prog="muster", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    parser.set_defaults(incomplete=parser)
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, command in COMMANDS.items():
        sub = parsers.add_action(subparsers, name, command.summary)
        if only is None or name == only:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def _hint(unknown: Sequence[str], flags: Collection[str]) -> str:
    files = [word for word in unknown if word.endswith((".yaml", ".yml")) and word[0] != "-"]
    if files and "--config" in flags:
        return f"; give a settings file with --config {files[0]}"
    name = unknown[0].partition("=")[0]
    if not name.startswith("--"):
        return ""
    from torchmuster.config.fields import suggest_name

    known = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    suggestion = suggest_name(name.removeprefix("--").replace("_", "-"), known)
    if suggestion:
        return "; " + suggestion.replace("did you mean ", "did you mean --")
    return "; the script's own flags follow the script" if "--dry-run" in flags else ""
