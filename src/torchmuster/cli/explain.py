"""``muster explain``: report what happened to a run, the root cause, and how to fix it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchmuster.cli import output, parsers
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import Finding, Status

if TYPE_CHECKING:
    from torchmuster.launch.history.failure_report import FailureReport
    from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint

_FILES_SHOWN = 8
_MOST_CHECKPOINTS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster explain``."""
    parser.description = (
        f"{parser.description}\nNeeds only the run folder: the run may be active, finished, or "
        "copied from "
        "another machine.\nTo explain an error text alone: muster doctor --explain."
    )
    parsers.show_examples(
        parser,
        [
            "muster explain                     the newest run in ./runs",
            "muster explain 20260131-1200       a unique part of the run's id",
            "muster explain /mnt/copied/20260131-120000-train-1a2b",
            "muster explain --dumps FOLDER      compare flight recorder dumps: rank-<n>.json",
        ],
    )
    parsers.add_run_argument(parser, default="the newest")
    parser.add_argument(
        "--dumps", type=Path, metavar="DIR", help="compare the flight recorder dumps in DIR instead"
    )
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_explain)


def _run_explain(options: argparse.Namespace) -> int:
    if options.dumps is not None:
        return _compare_dumps(options.dumps, as_json=options.json)
    from torchmuster.launch.history.failure_report import failure_report_of

    account = failure_report_of(choose_run(options.which, options.runs, "newest"))
    if options.json:
        _print_json(account)
    else:
        _show_explain(account)
    return ExitCode.GOOD


def _show_explain(account: "FailureReport") -> None:
    from torchmuster.launch.history.run_record import timeline_text

    run, moments = account.record.run, account.record.timeline()
    output.print_text(f"run {run.id}\n")
    for line in timeline_text(moments):
        output.print_text(f"  {line}")
    if moments:
        output.print_text()
    output.show_findings(list(account.findings), sys.stdout)
    if account.files:
        output.print_text(f"\nin {run.path}:")
        for name in account.files[:_FILES_SHOWN]:
            output.print_text(f"  {name}")
        if len(account.files) > _FILES_SHOWN:
            output.print_text(f"  … and {len(account.files) - _FILES_SHOWN} more")


def _print_json(account: "FailureReport") -> None:
    record = account.record
    state, job = record.state, record.job
    output.print_json(
        {
            "id": record.run.id,
            "folder": str(record.run.path),
            "phase": state.phase if state else None,
            "exit_code": state.exit_code if state else None,
            "killed_ranks": list(state.killed_ranks) if state else [],
            "started_unix_s": state.started_unix_s if state else None,
            "since_unix_s": state.since_unix_s if state else None,
            "command": job.command if job else None,
            "launched_on": job.launcher.host if job else None,
            "moments": [
                {"at_unix_s": one.at_unix_s, "what": one.what} for one in record.timeline()
            ],
            "findings": [one.as_json() for one in account.findings],
            "checkpoints": [
                _checkpoint_as_json(one) for one in record.checkpoints[:_MOST_CHECKPOINTS]
            ],
            "resume": state.resume if state else "",
            "files": list(account.files),
        }
    )


def _checkpoint_as_json(checkpoint: "ScriptCheckpoint") -> dict[str, object]:
    condition = checkpoint.condition
    return {**msgspec.structs.asdict(checkpoint), "state": condition.state, "why": condition.why}


def _compare_dumps(folder: Path, *, as_json: bool) -> int:
    from torchmuster.launch.hangs.flight_recorder import analyse_flight_records
    from torchmuster.launch.history.evidence import dumps_in

    dumps = dumps_in(folder)
    if not dumps:
        raise Impossible(
            f"there are no flight recorder dumps in {folder}",
            why="dumps are JSON files named rank-<n>.json or rank-<n>.flight.json",
            fix="in each rank, write torch._C._distributed_c10d._dump_fr_trace_json() to a file",
        )
    findings = analyse_flight_records(dumps) or [
        Finding(
            name="collectives-alike",
            status=Status.OK,
            what=f"{len(dumps)} ranks called the same collectives, and all of them completed",
        )
    ]
    if as_json:
        output.print_json({"findings": [one.as_json() for one in findings]})
    else:
        output.show_findings(findings, sys.stdout)
    return ExitCode.GOOD
