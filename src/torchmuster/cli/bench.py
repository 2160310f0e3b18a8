"""``muster bench``: benchmark this machine, with results that can be compared."""

import argparse
import importlib
import json
import os
import shutil
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchmuster.cli import output, parsers
from torchmuster.decision import Decision
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import exit_code

if TYPE_CHECKING:
    from torchmuster.bench.report.report import Report

# The module of each benchmark, and its line in the help. The module has add_arguments(parser) and
# run(options), and imports slow modules in run.
BENCHES = {
    "matmul": ("torchmuster.cli.benches.matmul", "matrix products: FLOP/s by size and dtype"),
    "precision": ("torchmuster.cli.benches.precision", "fp32, tf32, bf16, fp16: speed and accuracy"),
    "attention": ("torchmuster.cli.benches.attention", "attention backends by sequence length"),
    "memory": ("torchmuster.cli.benches.memory", "memory by stage; activation checkpointing"),
    "data": ("torchmuster.cli.benches.data", "data loading: workers, prefetching, pinning"),
    "collectives": ("torchmuster.cli.benches.collectives", "collectives by operation and size"),
    "scaling": ("torchmuster.cli.benches.scaling", "speed-up and efficiency on 1, 2, 4, … ranks"),
    "compare": ("torchmuster.cli.benches.compare", "compare two results: better, worse or within noise"),
}  # fmt: skip
_EXAMPLES = (
    "muster bench matmul                    speed of matrix products",
    "muster bench collectives --ranks 4     latency and bandwidth between ranks",
    "muster bench compare before after      better, worse, or within the noise",
)
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each benchmark."""
    parsers.show_examples(parser, _EXAMPLES)
    parts = parser.add_subparsers(title="benchmarks", metavar="BENCH")
    for name, (module, summary) in BENCHES.items():
        sub = parsers.add_action(parts, name, summary)
        bench: Any = importlib.import_module(module)
        bench.add_arguments(sub)
        sub.set_defaults(run=bench.run)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every benchmark: device, duration and output."""
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device to measure on (default: a GPU if there is one)",
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer cases; takes seconds")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: bench/NAME-DATE-TIME)",
    )
    parsers.add_json_flag(parser)


def device_of(options: argparse.Namespace) -> Decision[Literal["cpu", "gpu"]]:
    """Return the device to measure on, and the reason."""
    from torchmuster.devices import snapshot  # not for --help
    from torchmuster.devices.model import label_all
    from torchmuster.devices.visibility import visible

    seen = visible(snapshot.take_snapshot().accelerators, os.environ).devices
    if options.device == "gpu" and not seen:
        raise Impossible(
            "cannot measure on a GPU",
            why="no GPU is visible here",
            fix="leave out --device to measure on the CPU, or run muster doctor",
        )
    if options.device is not None:
        return Decision(value=options.device, reason="set by --device")
    if seen:
        return Decision(value="gpu", reason=f"visible: {label_all(seen)}")
    return Decision(value="cpu", reason="no GPU is visible here")


def finish(report: "Report", options: argparse.Namespace) -> ExitCode:
    """Save a report, print it, and return the exit code of its findings.

    Adds a finding if the machine was busy with other processes.
    """
    from torchmuster.bench import record  # not for --help
    from torchmuster.bench.environment import disturbance
    from torchmuster.bench.report.report import bench_screen, save_report

    disturbed = disturbance(report.record.environment)
    if disturbed is not None:
        report = replace(report, findings=(*report.findings, disturbed))
    folder = options.out or new_folder(report.bench)
    page = save_report(report, folder)
    if options.json:
        document = json.loads(record.encode_record(report.record))
        document["findings"] = [one.as_json() for one in report.findings]
        document["kept"] = str(folder)
        output.print_json(document)
    else:
        width = min(shutil.get_terminal_size().columns, _WIDTH)
        output.print_coloured(
            bench_screen(report, width=width, colour=output.wants_colour(sys.stdout))
        )
        output.print_text(f"\nsaved in {folder}: {page.name}, {record.FILE}")
    return exit_code(report.findings)


def now() -> str:
    """Return the current time in the format of records."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def new_folder(bench: str) -> Path:
    """Return the default folder for a benchmark's output, which does not exist yet."""
    stem = f"bench/{bench}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = Path(stem), 1
    while folder.exists():
        number += 1
        folder = Path(f"{stem}-{number}")
    return folder


_MOST = 10**7  # more is a typo


def size(text: str) -> int:
    """Parse a size; raise an error with an example if it is invalid."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 1024")
    return int(text)
