"""``muster bench compare``: placeholder until it is written."""

import argparse

from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing yet."""


def run(options: argparse.Namespace) -> ExitCode:
    """Do nothing yet."""
    return ExitCode.GOOD
