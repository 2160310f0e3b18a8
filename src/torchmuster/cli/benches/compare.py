"""``muster bench compare``: compare two measurements: better, worse, or within the noise."""

import argparse
import shutil
import sys
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode
from torchmuster.finding import exit_code
from torchmuster.runfolder import write_atomically

_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench compare``."""
    parser.description = (
        f"{parser.description}\nThe exit code is 1 if something is worse. One record per side "
        "detects large changes;\nseveral records per side, measured alternately, detect small ones."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench compare bench/matmul-20260131-120000 bench/matmul-20260207-120000",
            "muster bench compare before after       folders with several records each",
        ],
    )
    parser.add_argument(
        "before",
        type=Path,
        metavar="BEFORE",
        help="a record, its folder, or a folder that contains several of these",
    )
    parser.add_argument(
        "after", type=Path, metavar="AFTER", help="the record or folder to compare with BEFORE"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as HTML")
    parsers.add_json_flag(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Read both sides, compare them, and print the result."""
    from torchmuster.bench.comparison import compare_records
    from torchmuster.bench.record import records_at
    from torchmuster.bench.report import comparing

    before, after = (
        comparing.Side(name=str(path), records=records_at(path))
        for path in (options.before, options.after)
    )
    compared = comparing.ComparedSides(
        before=before, after=after, comparison=compare_records(before.records, after.records)
    )
    if options.html is not None:
        write_atomically(options.html, comparing.comparison_page(compared))
    if options.json:
        output.print_json(comparing.comparison_json(compared))
    else:
        width = min(shutil.get_terminal_size().columns, _WIDTH)
        output.print_coloured(
            comparing.comparison_text(compared, width=width, colour=output.wants_colour(sys.stdout))
        )
    return exit_code(comparing.comparison_findings(compared))
