"""``muster bench``: benchmark this host, and compare two records."""

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import exit_code

BENCHES = {
    "matmul": "matrix products: TFLOPS by size and dtype, GPU against CPU",
    "precision": "fp32, tf32, bf16, fp16: speed, memory, loss and overflow",
    "attention": "attention implementations by sequence length",
    "memory": "memory of training by stage; activation checkpointing",
    "data": "data loading by number of workers",
    "collectives": "latency and bandwidth between ranks",
    "scaling": "training on 1, 2, 4 ranks: throughput and efficiency",
    "compare": "compare two records: medians, quartiles, ratio",
}
EXAMPLES = (
    "muster bench matmul                    speed of matrix products",
    "muster bench scaling --ranks 1,2,4     throughput by number of ranks",
    "muster bench compare before after      slower, faster, or within noise",
)
LARGEST_NUMBER = 10**7  # more is a typo
SCREEN_WIDTH = 100

Device = Literal["cpu", "gpu"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each bench; ``cli/benches`` has its flags and its ``run``."""
    parsers.show_examples(parser, EXAMPLES)
    subcommands = parser.add_subparsers(title="benchmarks", metavar="BENCH")
    for name, summary in BENCHES.items():
        subparser = parsers.add_action(subcommands, name, summary)
        module: Any = importlib.import_module(f"torchmuster.cli.benches.{name}")
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every bench that measures."""
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device to measure on (default: a GPU if there is one)",
    )
    parser.add_argument("--quick", action="store_true", help="measure less; takes seconds")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: bench/NAME-DATE-TIME)",
    )
    parsers.add_json_flag(parser)


def numbers(text: str, lowest: int = 1) -> list[int]:
    """Parse a comma list of whole numbers: ``128,256``."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < lowest or values[-1] > LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers from {lowest} on; write for example 1,2,4"
        )
    return values


def visible_gpus() -> int:
    """Return the number of GPUs that a process started here would see."""
    from torchmuster.devices import snapshot  # not for --help
    from torchmuster.devices.visibility import visible

    return len(visible(snapshot.take_snapshot().accelerators, os.environ).devices)


def device_for(options: argparse.Namespace) -> Device:
    """Return the device to measure on: ``--device``, or a GPU if there is one."""
    gpus = visible_gpus()
    if options.device == "gpu" and not gpus:
        raise Impossible(
            "cannot measure on a GPU",
            why="no GPU is visible here",
            fix="leave out --device to measure on the CPU, or run muster doctor",
        )
    if options.device == "cpu" or not gpus:
        return "cpu"
    return "gpu"


def run_bench(
    name: str,
    options: argparse.Namespace,
    settings: dict[str, Any],
    *,
    device: Device,
    ranks: Sequence[int] = (1,),
    measuring: str = "",
) -> ExitCode:
    """Measure on each number of ranks, summarize, save and print; return the findings' exit code.

    ``torchmuster.bench.NAME`` has ``summarize``, and ``measure`` unless ``measuring`` names another
    module.
    """
    from torchmuster.bench import result, show  # not for --help
    from torchmuster.bench.ranks import measure_on_ranks

    module: Any = importlib.import_module(f"torchmuster.bench.{name}")
    rows = []
    for count in ranks:
        output.say(f"measuring on the {device.upper()} ({count} ranks)")
        rows += measure_on_ranks(
            measuring or module.__name__, settings, ranks=count, device=device, say=output.say
        )
    report = module.summarize(rows)
    record = result.Record(
        bench=name,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        host=result.describe_host(),
        settings={"device": device, "ranks": list(ranks), **settings},
        rows=tuple(rows),
        conclusion=report.conclusion,
        advice=report.advice,
    )
    folder = options.out or output.new_folder(Path("bench"), f"{name}-")
    files = show.save(report, record, folder)
    if options.json:
        document = json.loads(result.encode_record(record))
        document["findings"] = [finding.as_json() for finding in report.findings]
        document["folder"] = str(folder)
        output.print_json(document)
    else:
        width = min(shutil.get_terminal_size().columns, SCREEN_WIDTH)
        colour = output.wants_colour(sys.stdout)
        output.print_coloured(show.screen(report, width=width, colour=colour))
        output.print_text(f"\nsaved in {folder}: {', '.join(files)}")
    return exit_code(report.findings)
