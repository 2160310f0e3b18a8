"""``muster bench matmul``: the flags."""

import argparse

from torchmuster.cli import parsers
from torchmuster.cli.bench import add_common_flags, device_for, numbers, run_bench
from torchmuster.errors import ExitCode

SIZES = [128, 256, 512, 1024, 2048, 4096]
QUICK_SIZES = [128, 256, 512, 1024]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nMultiplies square matrices in float32 and bfloat16; with a GPU, also "
        "in float16 and on the CPU.\nLarge sizes are left out after a product that takes half a "
        "second. Checks the results."
    )
    parsers.show_examples(parser, ["muster bench matmul --sizes 1024,8192"])
    parser.add_argument(
        "--sizes", type=numbers, metavar="N,N", help="rows of the matrices (default: 128,…,4096)"
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    settings = {"sizes": sizes, "seconds": 0.1 if options.quick else 0.4}
    return run_bench("matmul", options, settings, device=device_for(options))
