"""``muster bench memory``: the flags."""

import argparse

from torchmuster.cli.bench import add_common_flags, device_for, run_bench
from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nTrains a small GPT in fp32, in bf16, and in fp32 with every 4th, 2nd "
        "and each block recomputed in the\nbackward. muster plan forecasts the memory of your own "
        "model."
    )
    parser.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="texts of a step (default: 16)"
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    settings = {"batch_size": options.batch_size, "seconds": 0.5 if options.quick else 2.0}
    return run_bench("memory", options, settings, device=device_for(options))
