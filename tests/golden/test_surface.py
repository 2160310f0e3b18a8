"""What people's scripts rely on is frozen: commands, flags, exit codes, settings, public names.

If a change is meant, run ``scripts/check tests tests/golden --snapshot-update`` and read the difference.
"""

import argparse
from collections.abc import Iterator

import pytest
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster import distributed
from torchmuster.cli.main import root_parser
from torchmuster.config import fields
from torchmuster.config.layers import variable_name
from torchmuster.errors import EXIT_CODE_MEANINGS, MusterError
from torchmuster.monitor.catalogue import METRICS
from torchmuster.notebook.command_line import magic_parser as notebook_parser


@pytest.fixture
def surface(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(TextFile)


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a line for each command, flag and positional argument, depth first."""
    subcommands: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands += action.choices.values()
        elif isinstance(action, argparse._HelpAction):
            continue
        elif action.option_strings:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest}"
            count = f" [{action.nargs}]" if action.nargs in {"+", "*", "?"} else ""
            yield f"{parser.prog} {'|'.join(action.option_strings)}{value}{count}"
        else:
            choices = f" {{{','.join(action.choices)}}}" if action.choices else ""
            yield f"{parser.prog} <{action.dest}>{choices}"
    for subcommand in subcommands:
        yield subcommand.prog
        yield from _commands(subcommand)


def test_commands_and_flags(surface: SnapshotAssertion) -> None:
    assert "\n".join(_commands(root_parser())) + "\n" == surface


def test_notebook_commands(surface: SnapshotAssertion) -> None:
    assert "\n".join(_commands(notebook_parser())) + "\n" == surface


def test_exit_codes(surface: SnapshotAssertion) -> None:
    lines = [f"{code.value} {code.name}: {text}" for code, text in EXIT_CODE_MEANINGS.items()]
    assert "\n".join(lines) + "\n" == surface


def test_errors(surface: SnapshotAssertion) -> None:
    def tree(kind: type[MusterError], depth: int = 0) -> Iterator[str]:
        yield f"{'  ' * depth}{kind.__name__} {kind.exit_code.value}"
        for child in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
            if child.__module__ == MusterError.__module__:
                yield from tree(child, depth + 1)

    assert "\n".join(tree(MusterError)) + "\n" == surface


def test_settings(surface: SnapshotAssertion) -> None:
    lines = [
        f"{path} ({fields.describe_field(path)}) = {leaf.default} ${variable_name(path)}"
        for path, leaf in fields.leaves().items()
    ]
    assert "\n".join(lines) + "\n" == surface


def test_public_functions(surface: SnapshotAssertion) -> None:
    import inspect

    lines = []
    for name in distributed.__all__:
        signature = inspect.signature(getattr(distributed, name))
        lines.append(f"{name}{signature}")
    assert "\n".join(lines) + "\n" == surface


def test_metrics(surface: SnapshotAssertion) -> None:
    lines = [f"{one.kind} {one.name} {' '.join(one.all_labels)}" for one in METRICS]
    assert "\n".join(lines) + "\n" == surface


@pytest.mark.parametrize("words", [[], ["gpus"], ["gpus", "pick"], ["config", "show"]], ids=str)
def test_every_help_has_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        root_parser().parse_args([*words, "--help"])
    assert end.value.code == 0
    assert "examples:\n  " in capsys.readouterr().out
