"""``muster bench collectives``: the flags."""

import argparse

from torchmuster.cli.bench import add_common_flags, device_for, run_bench, visible_gpus
from torchmuster.cli.options import count
from torchmuster.errors import ExitCode
from torchmuster.units import KiB, MiB

SIZES = [4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB]
QUICK_SIZES = [4 * KiB, MiB]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nTimes all-reduce, all-gather, reduce-scatter and broadcast on the "
        "ranks of this host, with the bus bandwidth\nof nccl-tests, and checks every value."
    )
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="ranks (default: one per GPU; 2 on the CPU)"
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    device = device_for(options)
    ranks = options.ranks or 2
    if options.ranks is None and device == "gpu":
        ranks = max(2, visible_gpus())
    settings = {"sizes": QUICK_SIZES if options.quick else SIZES}
    return run_bench("collectives", options, settings, device=device, ranks=[ranks])
