"""``muster bench compare``: the flags."""

import argparse
from dataclasses import asdict
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        f"{parser.description}\nA case is slower or faster if its median differs by more than 2 % and "
        "the quartile ranges do not overlap.\nExit code 1 if a case is slower."
    )
    parsers.show_examples(parser, ["muster bench compare bench/before bench/after"])
    parser.add_argument("before", type=Path, help="a record.json, or its folder")
    parser.add_argument("after", type=Path, help="the same")
    parsers.add_json_flag(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Read both records, compare, print."""
    from torchmuster.bench import compare  # not for --help
    from torchmuster.bench.result import read_record
    from torchmuster.pages.columns import aligned_columns

    before, after = read_record(options.before), read_record(options.after)
    changes = compare.compare_records(before, after)
    conclusion = compare.conclusion(changes)
    differences = compare.host_differences(before, after)
    if options.json:
        cases = [{**asdict(c), "ratio": c.ratio, "verdict": c.verdict} for c in changes]
        document = {"conclusion": conclusion, "differences": differences, "cases": cases}
        output.print_json(document)
    else:
        output.print_text(conclusion)
        for line in differences:
            output.print_text(f"  {line}")
        output.print_text()
        head = ("case", "before", "IQR", "after", "IQR", "ratio", "")
        for line in aligned_columns([head, *map(compare.cells, changes)], right=True):
            output.print_text(line)
    if any(change.verdict == "slower" for change in changes):
        return ExitCode.FAILED
    return ExitCode.GOOD
