"""``muster bench precision``: the flags."""

import argparse

from torchmuster.cli.bench import add_common_flags, device_for, run_bench
from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nTrains a small GPT from the same weights on the same texts in each "
        "precision, and two models whose\ngradients or activations overflow in fp16."
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    device = device_for(options)
    settings = {"steps": 60, "seconds": 2.0, "batch_size": 8, "blocks": 8}
    if device == "cpu":
        settings.update(batch_size=2, blocks=2)  # CPUs take seconds for a large step in fp16
    if options.quick:
        settings.update(steps=20, seconds=0.5)
    return run_bench("precision", options, settings, device=device)
