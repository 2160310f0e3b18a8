"""``muster selftest``: check on this hardware what the tests of torchmuster could not run."""

import argparse
import signal
import sys
import time
from pathlib import Path

from torchmuster.cli import job_flags, output, parsers
from torchmuster.errors import ExitCode, Impossible
from torchmuster.selftest.check import Check
from torchmuster.selftest.checks.all_checks import CHECKS
from torchmuster.selftest.record import CheckResult, SelftestRecord

_USUAL_MINUTES = 40.0
_USUAL_OUT = Path("selftest.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster selftest``."""
    parser.description = (
        f"{parser.description}\nRuns small trainings, collectives, failures and measurements on free GPUs, or on the CPU, "
        "and\nwrites one result file without names of hosts or users. Models are small, and nothing that it\nstarts "
        "is left behind."
    )
    parsers.show_examples(
        parser,
        [
            "muster selftest --gpus                        all checks that fit these GPUs",
            "muster selftest strategies resume             only these two",
            "muster selftest --list                        the checks and what they need",
            "muster selftest --planted-faults              show that each check can fail",
        ],
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="run only these checks")
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device of the ranks (default: GPUs if there are any, else the CPU)",
    )
    parser.add_argument(
        "--gpus", dest="device", action="store_const", const="gpu", help="same as --device gpu"
    )
    parser.add_argument(
        "--num-gpus",
        type=job_flags.count,
        metavar="N",
        help="use at most N GPUs: 1, 2, 4 or 8 (default: as many as are free)",
    )
    parser.add_argument(
        "--hosts", metavar="NAME,…", default="", help="also check these hosts together, over ssh"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=_USUAL_MINUTES,
        metavar="N",
        help=f"start no check that would take longer than this (default: {_USUAL_MINUTES:g})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=_USUAL_OUT,
        metavar="FILE",
        help=f"result file (default: {_USUAL_OUT})",
    )
    parser.add_argument(
        "--planted-faults",
        action="store_true",
        help="plant a fault in each check; each one must then be refuted",
    )
    parser.add_argument("--list", action="store_true", help="show the checks and run none")
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_selftest)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return minutes


def _run_selftest(options: argparse.Namespace) -> int:
    from torchmuster.selftest.hardware import hardware_here
    from torchmuster.selftest.record import make_record, write_record
    from torchmuster.selftest.report import result_table
    from torchmuster.selftest.running import run_checks

    chosen = _chosen(options.checks)
    if options.list:
        _show_list(options.json)
        return ExitCode.GOOD
    hosts = [one for one in options.hosts.split(",") if one]
    here = hardware_here(options.device or "auto", hosts, most_gpus=options.num_gpus)
    where = ", ".join(here.gpus) or f"CPU ({here.ranks} processes)"
    output.say(f"muster: {len(chosen)} checks on {where}, at most {options.minutes:g} min")
    begun = time.monotonic()
    # As Ctrl-C: the check that runs is stopped with all its processes, and its files are deleted.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), lambda *_: sys.exit(ExitCode.TERMINATED))
    record = make_record(here, [], seconds=0, planted=options.planted_faults)

    def save(found: list[CheckResult]) -> None:
        nonlocal record
        seconds = time.monotonic() - begun
        record = make_record(here, found, seconds=seconds, planted=options.planted_faults)
        write_record(options.out, record, hosts=hosts)

    run_checks(
        chosen,
        here,
        hosts=hosts,
        minutes=options.minutes,
        planted=options.planted_faults,
        say=output.say,
        save=save,
    )
    if options.json:
        from torchmuster import untrusted

        output.print_json(untrusted.read_json(options.out))
    else:
        output.print_text(result_table(record, width=output.width()))
        output.print_text(f"\nresult file: {options.out}")
    return ExitCode.GOOD if _is_good(record) else ExitCode.FAILED


def _chosen(names: list[str]) -> list[Check]:
    known = {one.id: one for one in CHECKS}
    for name in names:
        if name not in known:
            raise Impossible(f"there is no check {name!r}", fix=f"choose among {', '.join(known)}")
    return [one for one in CHECKS if not names or one.id in names]


def _show_list(as_json: bool) -> None:
    from torchmuster.selftest.hardware import NEEDS

    rows = [
        {
            "id": one.id,
            "question": one.question,
            "needs": list(one.needs),
            "seconds": one.seconds,
            "planted fault": one.fault,
        }
        for one in CHECKS
    ]
    if as_json:
        output.print_json(rows)
        return
    for one in CHECKS:
        needs = f"  (needs {' and '.join(NEEDS[need] for need in one.needs)})" if one.needs else ""
        output.print_text(f"{one.id:<16} {one.question}{needs}")


def _is_good(record: SelftestRecord) -> bool:
    verdicts = {one.verdict for one in record.checks} - {"not run"}
    return verdicts <= ({"refuted"} if record.planted else {"confirmed"})
