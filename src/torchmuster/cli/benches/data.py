"""``muster bench data``: the flags."""

import argparse
from functools import partial

from torchmuster.cli import parsers
from torchmuster.cli.bench import (
    add_common_flags,
    device_for,
    numbers,
    run_bench,
    visible_gpus,
)
from torchmuster.cli.jobs import settings_of
from torchmuster.cli.options import SettingOptions, add_flags, count, read_options
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import ExitCode, Impossible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nReads the data of your settings as training does, with 0, 1, 2, 4, … "
        "workers per rank, and checks that the\nbatches are the same."
    )
    examples = (
        "muster bench data --config config.yaml",
        "muster bench data --set data.dataset=own.data:train --workers 0,4,8",
    )
    parsers.show_examples(parser, examples)
    parser.add_argument(
        "--workers",
        type=partial(numbers, lowest=0),
        metavar="N,N",
        help="numbers of workers per rank (default: 0,1,2,4,… up to the cores of a rank)",
    )
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="ranks that read at once (default: one per GPU)"
    )
    add_flags(parser, SettingOptions)
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print."""
    import msgspec

    data_settings = settings_of(read_options(SettingOptions, options)).settings
    data = data_settings.data
    if data.dataset is None and data.files is None and data.hugging_face is None:
        raise Impossible(
            "there is no data to read",
            why="the settings name no data",
            fix="--config FILE with data.dataset, data.files or data.hugging_face, or "
            "--set data.dataset=module:function",
        )
    device = device_for(options)
    ranks = options.ranks or 1
    if options.ranks is None and device == "gpu":
        ranks = visible_gpus()
    settings = {
        "settings": msgspec.to_builtins(data_settings),
        "workers": options.workers or usual_workers(usable_cores().value // ranks),
        "seconds": 0.3 if options.quick else 2.0,
    }
    return run_bench(
        "data",
        options,
        settings,
        device=device,
        ranks=[ranks],
        measuring="torchmuster.worker.reading",
    )


def usual_workers(cores: int) -> list[int]:
    """Return 0, 1, 2, 4, … up to the cores of a rank, at least 2."""
    counts = [0, 1, 2]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return counts
