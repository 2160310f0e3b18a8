"""Options of a command as its parser fills them."""

import argparse
from typing import TypeVar

from torchmuster.cli.options import add_flags, read_options

T = TypeVar("T")


def options_from(options: type[T], *words: str, **filled: object) -> T:
    """Parse the words as the flags of a command."""
    parser = argparse.ArgumentParser()
    add_flags(parser, options)
    return read_options(options, parser.parse_args(words), **filled)
