"""The entry point: finds the subcommand, imports its module, runs it, turns errors into exit codes."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster import __version__
from torchmuster.cli import output, parsers, scripts
from torchmuster.errors import EXIT_CODE_MEANINGS, ExitCode, MusterError
from torchmuster.runfolder import NO_ROOM


@dataclass(frozen=True)
class Command:
    """A subcommand: where it lives, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "gpus": Command("torchmuster.cli.gpus", "see the GPUs of this machine; pick free ones"),
    "doctor": Command("torchmuster.cli.doctor", "examine this machine; explain an error"),
    "check": Command("torchmuster.cli.check", "see whether machines can train together"),
    "plan": Command("torchmuster.cli.plan", "see if it fits, how to split it, how fast it will be"),
    "bench": Command("torchmuster.cli.bench", "measure what this machine reaches; compare"),
    "profile": Command(
        "torchmuster.cli.profile", "see where a training's time goes; what to change"
    ),
    "train": Command("torchmuster.cli.train", "train a model from a settings file"),
    "run": Command("torchmuster.cli.run", "start a script on this machine or on many"),
    "host": Command("torchmuster.cli.host", "start a script here; others join by a code"),
    "join": Command("torchmuster.cli.join", "take part in a run that another machine hosts"),
    "smoke": Command("torchmuster.cli.smoke", "prove that ranks can work together"),
    "kubernetes": Command("torchmuster.cli.kubernetes", "write manifests that run a script"),
    "explain": Command(
        "torchmuster.cli.explain", "say what happened to a run, why, and what to do"
    ),
    "checkpoint": Command("torchmuster.cli.checkpoint", "list, verify and export what was saved"),
    "watch": Command(
        "torchmuster.cli.watch", "see how a run goes, live; be told when it needs you"
    ),
    "top": Command("torchmuster.cli.top", "see all GPUs and ranks, live"),
    "exporter": Command(
        "torchmuster.cli.exporter", "serve metrics of machine and runs to Prometheus"
    ),
    "runs": Command("torchmuster.cli.runs", "list the runs and how they went"),
    "attach": Command("torchmuster.cli.attach", "follow a run that was started elsewhere"),
    "stop": Command("torchmuster.cli.stop", "end a run, on all its machines"),
    "lab": Command("torchmuster.cli.lab", "learn it: labs with tests, solutions and reports"),
    "config": Command("torchmuster.cli.config", "show, check and describe settings"),
    "completion": Command("torchmuster.cli.completion", "print a shell's completion script"),
}

# In these everything from the script on belongs to the script.
_TAKE_SCRIPT = frozenset({"check", "run", "host", "kubernetes", "profile"})

_EXAMPLES = (
    "muster gpus                                   who uses which GPU",
    "muster run --num-gpus 2 train.py --lr 1e-4    a torchrun script on two free GPUs",
    "muster run --hosts a,b:4 train.py             on two machines, over ssh",
    "muster config check config.yaml               every mistake in a settings file, with its line",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output.replace_what_cannot_be_shown()
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, command = scripts.split_off(words) if _takes_script(words) else _split_off_command(words)
    parser = root_parser(only=next((word for word in words if word in COMMANDS), ""))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        hint = _hint(words, unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not hasattr(options, "run"):  # muster, or muster lab: the help says what is missing
        options.incomplete.print_help()
        return ExitCode.IMPOSSIBLE
    if command is not None and not hasattr(options, "command"):
        parser.error("this command does not run another one after --")
    if command is not None:
        options.command = command
    options.words = words
    code = int(ExitCode.GOOD)
    try:
        try:
            code = int(options.run(options))
        except MusterError as error:
            code = error.exit_code
            output.show_error(error, as_json=getattr(options, "json", False))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone: nobody is left to complain to
        _forget_output()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise  # of our own making: its traceback belongs in a report
        _forget_output()
        output.say(f"failure  the answer could not be written: {error.strerror or error}")
        return ExitCode.FAILED
    return code


def _forget_output() -> None:
    """Keep Python from trying once more, while it closes stdout, what has just failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def root_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with ``only``, just that subcommand's module is imported."""
    parser = argparse.ArgumentParser(
        prog="muster",
        description="From some GPUs to a distributed PyTorch run that is proven to work.",
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


def _hint(words: Sequence[str], unknown: Sequence[str]) -> str:
    if _takes_script(words):
        return "; the script's own flags come after the script"
    files = [word for word in unknown if word.endswith((".yaml", ".yml")) and word[0] != "-"]
    return f"; a settings file is given as --config {files[0]}" if files else ""


def _split_off_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Take off ``-- command …`` first, so that nothing in it can be mistaken for ours."""
    if "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]
