"""``muster bench ab``: interleaved A/B run of two commands, to measure small changes."""

import argparse
from pathlib import Path

from torchmuster.bench.interleaved import PAIRS
from torchmuster.cli import output, parsers
from torchmuster.cli.bench import new_folder, size
from torchmuster.cli.benches import compare
from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench ab``."""
    parser.description = (
        f"{parser.description}\nBoth commands run at the same time and alternate sample by "
        "sample, so that a "
        "busy machine affects\nboth. Repeats this --pairs times with new processes, and "
        "compares the results "
        "like\nmuster bench compare. The exit code is 1 if something is worse."
    )
    parsers.show_examples(
        parser,
        [
            'muster bench ab "muster bench matmul" "OMP_NUM_THREADS=1 muster bench matmul"',
            'muster bench ab "old/bin/muster bench attention" "new/bin/muster bench attention"',
        ],
    )
    parser.add_argument("before", metavar="BEFORE", help="a muster bench command, quoted")
    parser.add_argument("after", metavar="AFTER", help="the command to compare with BEFORE")
    parser.add_argument(
        "--pairs",
        type=size,
        default=PAIRS,
        metavar="N",
        help=f"number of repetitions, each with new processes (default: {PAIRS})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the records (default: bench/ab-DATE-TIME)",
    )
    compare.add_output_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure both sides interleaved, compare them, and print the result."""
    from torchmuster.bench.ab_run import measure_pairs, parse_commands

    commands = {"before": parse_commands(options.before), "after": parse_commands(options.after)}
    folder = options.out or new_folder("ab")
    measure_pairs(commands, folder, pairs=options.pairs, say=output.say)
    code = compare.show(folder / "before", folder / "after", options)
    if not options.json:
        output.print_text(f"\nsaved in {folder}")
    return code
