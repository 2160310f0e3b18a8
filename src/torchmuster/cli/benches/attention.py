"""``muster bench attention``: the flags."""

import argparse

from torchmuster.cli import parsers
from torchmuster.cli.bench import add_common_flags, device_for, numbers, run_bench
from torchmuster.errors import ExitCode

LENGTHS = [128, 256, 512, 1024, 2048]
QUICK_LENGTHS = [128, 512]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nCompares the plain formula with the backends of "
        "scaled_dot_product_attention: time, peak memory, outputs and\ngradients, for causal "
        "attention with 8 heads of width 64."
    )
    parsers.show_examples(parser, ["muster bench attention --lengths 512,4096"])
    parser.add_argument(
        "--lengths", type=numbers, metavar="N,N", help="sequence lengths (default: 128,…,2048)"
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    settings = {"lengths": lengths, "seconds": 0.1 if options.quick else 0.4}
    return run_bench("attention", options, settings, device=device_for(options))
