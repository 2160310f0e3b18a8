"""Sizes on the command lines of benches: rows, tokens, steps."""

import argparse

_MOST = 10**7  # more is a slip of the hand


def size(text: str) -> int:
    """Return a size; what is none is refused with an example."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 1024")
    return int(text)
