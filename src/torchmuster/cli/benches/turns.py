"""``muster bench turns``: two commands side by side, sample by sample, so that small changes show on busy machines."""

import argparse
from pathlib import Path

from torchmuster.bench.interleaved import PAIRS
from torchmuster.cli import output, parsers
from torchmuster.cli.bench import new_folder, size
from torchmuster.cli.benches import compare
from torchmuster.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two commands."""
    parser.description = (
        f"{parser.description}\nBoth commands run at a time and take turns: a sample of one, then one of the other, so that what\n"
        "happens to the machine happens to both. That is done with fresh processes as often as --pairs says,\n"
        "and compared as muster bench compare does. The exit code is 1 if something is worse."
    )
    parsers.show_examples(
        parser,
        [
            'muster bench turns "muster bench matmul" "OMP_NUM_THREADS=1 muster bench matmul"',
            'muster bench turns "old/bin/muster bench attention" "new/bin/muster bench attention"',
        ],
    )
    parser.add_argument(
        "before", metavar="BEFORE", help="a command of muster bench, quoted, as it was"
    )
    parser.add_argument("after", metavar="AFTER", help="the same as it is now")
    parser.add_argument(
        "--pairs",
        type=size,
        default=PAIRS,
        metavar="N",
        help=f"how often, with fresh processes ({PAIRS})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to keep the records (bench/turns-DATE-TIME)"
    )
    compare.add_output_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure both sides in turns, compare them, and show what came of it."""
    from torchmuster.bench.ab_run import measure_pairs, parse_commands

    commands = {"before": parse_commands(options.before), "after": parse_commands(options.after)}
    folder = options.out or new_folder("turns")
    measure_pairs(commands, folder, pairs=options.pairs, say=output.say)
    code = compare.show(folder / "before", folder / "after", options)
    if not options.json:
        print(f"\nkept in {folder}", flush=True)
    return code
