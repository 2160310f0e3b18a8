"""``muster bench scaling``: the flags."""

import argparse

from torchmuster.cli import parsers
from torchmuster.cli.bench import (
    add_common_flags,
    device_for,
    numbers,
    run_bench,
    visible_gpus,
)
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import ExitCode, Impossible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nTrains a small GPT with DDP on 1, 2, 4 ranks of this host, each rank "
        "with its own batch, with and without\nexchanging gradients."
    )
    parsers.show_examples(parser, ["muster bench scaling --ranks 1,2,4,8"])
    parser.add_argument(
        "--ranks",
        type=numbers,
        metavar="N,N",
        help="numbers of ranks (default: 1,2,4; on GPUs 1,2,4,… up to all)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="texts of each rank (default: 8)"
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    device = device_for(options)
    ranks = options.ranks or [1, 2, 4]
    if options.ranks is None and device == "gpu":
        ranks = doublings(visible_gpus())
    settings = {"batch_size": options.batch_size, "samples": 5 if options.quick else 12}
    if device == "cpu":
        settings["threads"] = max(1, usable_cores().value // max(ranks))
    return run_bench("scaling", options, settings, device=device, ranks=ranks)


def doublings(gpus: int) -> list[int]:
    """Return 1, 2, 4, … up to the number of GPUs."""
    if gpus < 2:
        raise Impossible(
            "cannot measure scaling with fewer than 2 GPUs",
            why="there is one GPU, and each rank needs its own",
            fix="muster bench scaling --device cpu --ranks 1,2",
        )
    counts = [1]
    while counts[-1] * 2 <= gpus:
        counts.append(counts[-1] * 2)
    return counts
