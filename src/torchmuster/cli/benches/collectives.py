"""``muster bench collectives``: collectives between ranks, by operation and size."""

import argparse
import time
from pathlib import Path
from typing import Literal

from torchmuster.bench.bandwidth import OPERATIONS
from torchmuster.cli import job_flags, output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now
from torchmuster.cli.job_flags import count
from torchmuster.errors import ExitCode
from torchmuster.launch.job import Host, JobSpec, Limits, parse_hosts
from torchmuster.units import KiB, MiB, parse_bytes

_SMALLEST_BYTES = 1 * KiB
_LARGEST_BYTES = {"cpu": 16 * MiB, "gpu": 256 * MiB}
_LARGEST_QUICK_BYTES = 1 * MiB
_ROUNDS, _QUICK_ROUNDS = 15, 6
_RANKS_ON_A_CPU = 2
_HANGS_AFTER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench collectives``."""
    parser.description = (
        f"{parser.description}\nReal ranks send messages of many sizes. Shows latency and "
        "bandwidth of each "
        "operation, with bus\nbandwidths as nccl-tests defines them; checks every received value."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench collectives                       a rank on each GPU, or two on the CPU",
            "muster bench collectives --ranks 4 --largest 64MiB",
            "muster bench collectives --operations all-reduce,send-receive",
            "muster bench collectives --hosts a,b:2         three ranks on two hosts, over ssh",
        ],
    )
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="ranks on each host (default: one per GPU; on the CPU 2, or 1 with --hosts)",
    )
    parser.add_argument(
        "--operations",
        type=_operations,
        default=tuple(OPERATIONS),
        metavar="KINDS",
        help=f"some of {', '.join(OPERATIONS)} (default: all)",
    )
    parser.add_argument(
        "--smallest",
        type=_collectives_size,
        default=_SMALLEST_BYTES,
        metavar="SIZE",
        help="smallest message (default: 1KiB); each following size is 4 times larger",
    )
    parser.add_argument(
        "--largest",
        type=_collectives_size,
        metavar="SIZE",
        help="largest message (default: 16MiB, or 256MiB on GPUs)",
    )
    parser.add_argument(
        "--rounds", type=count, metavar="N", help=f"samples per size (default: {_ROUNDS})"
    )
    add_common_flags(parser)
    job_flags.add_host_flags(job_flags.add_rendezvous_flags(parser))


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a comma-separated list of some of {', '.join(OPERATIONS)}"
        )
    return names


def _collectives_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    from torchmuster.bench import collectives, environment
    from torchmuster.bench.collectives_report import collectives_report

    begun_s = time.monotonic()
    device = device_of(options)
    before = environment.environment_here(device.value)
    hosts = parse_hosts(options.hosts) if options.hosts else ()
    usual = len(before.devices) if device.value == "gpu" else 1 if hosts else _RANKS_ON_A_CPU
    each = options.ranks or usual
    ranks = sum(host.ranks or each for host in hosts) if hosts else each
    largest = _LARGEST_QUICK_BYTES if options.quick else _LARGEST_BYTES[device.value]
    asked = collectives.CollectivesRequest(
        operations=options.operations,
        sizes_bytes=collectives.sizes_between(
            options.smallest, options.largest or max(largest, options.smallest)
        ),
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        device=device.value,
    )
    collectives.check_collectives_request(asked, ranks=ranks)
    output.say(f"on {device.value}: {device.reason}; {ranks} ranks")
    if hosts:
        spec = _job(options, hosts, device.value)
        measured = collectives.measure_collectives_on(
            asked, spec, python=options.remote_python, say=output.say
        )
    else:
        measured = collectives.measure_collectives(asked, ranks=ranks, say=output.say)
    return finish(
        collectives_report(
            *(measured, asked),
            environment=before.ended(),
            date=now(),
            took_s=time.monotonic() - begun_s,
        ),
        options,
    )


def _job(
    options: argparse.Namespace, hosts: tuple[Host, ...], device: Literal["cpu", "gpu"]
) -> JobSpec:
    return JobSpec(
        name="bench",
        command=(),
        typed=("bench", "collectives"),
        folder=str(Path.cwd()),
        device=device,
        ranks=options.ranks,
        hosts=hosts,
        port=options.port,
        address=options.address,
        limits=Limits(
            join_s=options.join_timeout,
            lost_after_s=options.lost_after,
            grace_s=1.0,
            end_hangs_s=_HANGS_AFTER_S,
        ),
    )
