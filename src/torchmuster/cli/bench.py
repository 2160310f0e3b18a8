"""``muster bench``: what this machine reaches, in figures that can be compared."""

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

# Where each bench lives, and its line in the help. Its module has add_arguments(parser) and
# run(options), and imports in run what takes time to import.
BENCHES = {
    "matmul": ("torchmuster.cli.benches.matmul", "products of matrices: FLOP/s by size and type"),
    "precision": ("torchmuster.cli.benches.precision", "fp32, tf32, bf16, fp16: speed and accuracy"),
    "attention": ("torchmuster.cli.benches.attention", "kinds of attention by sequence length"),
    "memory": ("torchmuster.cli.benches.memory", "memory by training stage; what checkpointing gives"),
    "data": ("torchmuster.cli.benches.data", "the loader: workers, prefetching, pinning"),
    "collectives": ("torchmuster.cli.benches.collectives", "messages between ranks by size"),
    "scaling": ("torchmuster.cli.benches.scaling", "1, 2, 4, … ranks: what more of them give"),
    "compare": ("torchmuster.cli.benches.compare", "two measurements: better, worse or within noise"),
    "turns": ("torchmuster.cli.benches.turns", "two commands in turns: small changes, on busy machines"),
}  # fmt: skip
_EXAMPLES = (
    "muster bench matmul                    how fast are matrix products here",
    "muster bench collectives --ranks 4     how fast do ranks talk to each other",
    "muster bench compare before after      is it better, worse, or within the noise",
    'muster bench turns "muster bench data" "new/bin/muster bench data"    the same, side by side',
)
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each bench."""
    parsers.show_examples(parser, _EXAMPLES)
    parts = parser.add_subparsers(title="what to measure", metavar="BENCH")
    for name, (module, summary) in BENCHES.items():
        sub = parsers.add_action(parts, name, summary)
        bench: Any = importlib.import_module(module)
        bench.add_arguments(sub)
        sub.set_defaults(run=bench.run)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add what every bench has: where to measure, how long, and where to leave it."""
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="where to measure (a GPU if there is one)"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, in seconds")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to keep it (bench/NAME-DATE-TIME)"
    )
    parsers.add_json_flag(parser)


def device_of(options: argparse.Namespace) -> Decision[Literal["cpu", "gpu"]]:
    """Return where to measure, and why there."""
    from torchmuster.devices import snapshot  # not for --help
    from torchmuster.devices.model import label_all
    from torchmuster.devices.visibility import visible

    seen = visible(snapshot.take_snapshot().accelerators, os.environ).devices
    if options.device == "gpu" and not seen:
        raise Impossible(
            "asked to measure on a GPU",
            why="no GPU is visible here",
            fix="leave --device out to measure on the processor, or see what muster doctor says",
        )
    if options.device is not None:
        return Decision(value=options.device, reason="as --device says")
    if seen:
        return Decision(value="gpu", reason=f"{label_all(seen)} can be seen")
    return Decision(value="cpu", reason="no GPU is visible here")


def finish(report: "Report", options: argparse.Namespace) -> ExitCode:
    """Keep a report, show it, and return the exit code that its findings call for.

    That the machine was busy with other things is added to what was found.
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
        print(bench_screen(report, width=width, colour=output.wants_colour(sys.stdout)))
        print(f"\nkept in {folder}: {page.name}, {record.FILE}", flush=True)
    return exit_code(report.findings)


def now() -> str:
    """Return the time as records have it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def new_folder(bench: str) -> Path:
    """Return where a bench is kept if nobody says where; nothing is there yet."""
    stem = f"bench/{bench}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = Path(stem), 1
    while folder.exists():
        number += 1
        folder = Path(f"{stem}-{number}")
    return folder


_MOST = 10**7  # more is a slip of the hand


def size(text: str) -> int:
    """Return a size; what is none is refused with an example."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 1024")
    return int(text)
