"""``muster bench collectives``: messages between ranks, by kind and size."""

import argparse
import time

from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now
from torchmuster.cli.job_flags import count
from torchmuster.errors import ExitCode
from torchmuster.measure.collectives import OPERATIONS
from torchmuster.units import KiB, MiB, parse_bytes

_SMALLEST_BYTES = 1 * KiB
_LARGEST_BYTES = {"cpu": 16 * MiB, "gpu": 256 * MiB}
_LARGEST_QUICK_BYTES = 1 * MiB
_ROUNDS, _QUICK_ROUNDS = 15, 6
_RANKS_ON_A_CPU = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench collectives``."""
    parser.description = (
        f"{parser.description}\nReal ranks send messages of many sizes. Ends in latency and bandwidth of "
        "each kind, with bus\nbandwidths as nccl-tests defines them; every value that arrives is compared."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench collectives                       a rank on each GPU, or two on the CPU",
            "muster bench collectives --ranks 4 --largest 64MiB",
            "muster bench collectives --operations all-reduce,send-receive",
        ],
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks (one per GPU; CPU: 2)")
    parser.add_argument(
        "--operations",
        type=_operations,
        default=tuple(OPERATIONS),
        metavar="KINDS",
        help=f"some of {', '.join(OPERATIONS)} (all)",
    )
    parser.add_argument(
        "--smallest",
        type=_size,
        default=_SMALLEST_BYTES,
        metavar="SIZE",
        help="the smallest message (1KiB); each is 4 times the one before",
    )
    parser.add_argument(
        "--largest", type=_size, metavar="SIZE", help="the largest (16MiB; on GPUs 256MiB)"
    )
    parser.add_argument("--rounds", type=count, metavar="N", help=f"samples of each ({_ROUNDS})")
    add_common_flags(parser)


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of some of {', '.join(OPERATIONS)}"
        )
    return names


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, keep it and say it."""
    from torchmuster.measure import collectives, environment
    from torchmuster.measure.collectives_report import report

    begun_s = time.monotonic()
    device = device_of(options)
    before = environment.here(device.value)
    ranks = options.ranks or (len(before.devices) if device.value == "gpu" else _RANKS_ON_A_CPU)
    largest = _LARGEST_QUICK_BYTES if options.quick else _LARGEST_BYTES[device.value]
    asked = collectives.Asked(
        operations=options.operations,
        sizes_bytes=collectives.sizes_between(
            options.smallest, options.largest or max(largest, options.smallest)
        ),
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        device=device.value,
    )
    collectives.check(asked, ranks=ranks)
    output.say(f"on {device.value}: {device.reason}; {ranks} ranks")
    measured = collectives.measure(asked, ranks=ranks, say=output.say)
    return finish(
        report(
            *(measured, asked),
            environment=before.ended(),
            date=now(),
            took_s=time.monotonic() - begun_s,
        ),
        options,
    )
