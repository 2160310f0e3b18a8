"""Entry point: import the module of the subcommand, run it, convert errors to exit codes."""

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster import __version__
from torchmuster.cli import output, parsers, scripts
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

# In these commands, everything from the script on belongs to the script.
_TAKE_SCRIPT = frozenset({"check", "run", "kubernetes", "profile", "prove"})

_EXAMPLES = (
    "muster gpus                                   who is using which GPU",
    "muster run --num-gpus 2 train.py --lr 1e-4    a torchrun script on two free GPUs",
    "muster run --hosts a,b:4 train.py             on two hosts, over ssh",
    "muster config check config.yaml               all mistakes in a settings file, with lines",
)


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
            output.show_error(error, as_json="--json" in _split_off(words)[0])
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


def _run_command(arguments: Sequence[str]) -> int:
    words, command = _split_off(arguments)
    if words[:1] == ["run"]:
        from torchmuster.cli import other_launchers

        words, command = other_launchers.muster_words(arguments, os.environ, Path.cwd())
    words = scripts.with_joined_values(words)
    parser = root_parser(only=next((word for word in words if word in COMMANDS), ""))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        flags = options.incomplete._option_string_actions
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(words, unknown, flags)}")
    if not hasattr(options, "run"):  # muster, or muster lab: the help says what is missing
        options.incomplete.print_help()
        return ExitCode.IMPOSSIBLE
    if command is not None and not hasattr(options, "command"):
        parser.error("this command does not take a command after --")
    if command is not None:
        options.command = command
    options.words = words
    return int(options.run(options))


def _forget_output() -> None:
    """Redirect stdout to the null device, so that Python does not retry the write on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def root_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with ``only``, import only that subcommand's module."""
    parser = argparse.ArgumentParser(
        prog="muster",
        description="Launch, check, plan and watch distributed PyTorch training.",
        formatter_class=parsers.HelpFormat,
        allow_abbrev=False,
    )
    parsers.show_examples(parser, _EXAMPLES)
    codes = [f"{code.value:<5}{text}" for code, text in EXIT_CODE_MEANINGS.items()]
    parser.epilog = "\n  ".join([f"{parser.epilog}\n\nexit codes:", *codes])
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    parser.set_defaults(incomplete=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = parsers.add_action(subparsers, name, command.summary)
        if only is None or name == only:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def _takes_script(words: Sequence[str]) -> bool:
    return next((word in _TAKE_SCRIPT for word in words if word in COMMANDS), False)


def _hint(words: Sequence[str], unknown: Sequence[str], flags: Collection[str]) -> str:
    files = [word for word in unknown if word.endswith((".yaml", ".yml")) and word[0] != "-"]
    if files and not _takes_script(words):
        return f"; give a settings file with --config {files[0]}"
    flag = unknown[0].partition("=")[0]
    if flag.startswith("--"):
        from torchmuster.cli import other_launchers

        takes_torchruns = words[:1] == ["run"]
        if hint := other_launchers.hint_for(flag, flags, takes_torchruns=takes_torchruns):
            return f"; {hint}"
    return "; put the script's own flags after the script" if _takes_script(words) else ""


def _split_off(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split off the script, or the command after ``--``."""
    return (scripts.split_off if _takes_script(words) else _split_off_command)(list(words))


def _split_off_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Split off ``-- command …``, so that its flags are not parsed as flags of muster."""
    if "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]
