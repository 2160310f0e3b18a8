"""``muster queue``: list the jobs that wait for GPUs of this machine, and change one's own."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.cli import output, parsers
from torchmuster.cli.queueing import priority
from torchmuster.devices import snapshot
from torchmuster.devices.borrow import is_within_share
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Node
from torchmuster.devices.processes import user_of_this_process
from torchmuster.devices.queue import QueuePlan, expected_starts, plan_queue
from torchmuster.devices.request import Claim
from torchmuster.devices.shares import read_shares
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import queue_entry, run_state
from torchmuster.launch.history.run_end import expected_end
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder, refuse_foreign
from torchmuster.units import format_seconds, plural

_UNIT = """\
[Unit]
Description=Submit the queued jobs of torchmuster again after a restart of the machine

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=10min
ExecStart={command} queue restore

[Install]
WantedBy=default.target
"""
_UNIT_PATH = "~/.config/systemd/user/muster-queue.service"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster queue`` and its actions."""
    parsers.show_examples(
        parser,
        [
            "muster queue                          who waits, for what, and until when",
            "muster run --queue --num-gpus 2 --time-limit 4h train.py    add a job",
            "muster queue priority last 10         before your other jobs",
            "muster queue cancel 20260131-1200     a unique part of the run's id",
        ],
    )
    parsers.add_json_flag(parser)
    parser.set_defaults(run=_run_list)
    actions = parser.add_subparsers(title="more", metavar="ACTION")
    for name, summary, run in (
        ("cancel", "remove one of your jobs from the queue", _run_cancel),
        ("hold", "keep one of your jobs from starting", _run_hold),
        ("release", "let a held job start", _run_release),
        ("priority", "order your own jobs: the highest number first", _run_priority),
    ):
        action = parsers.add_action(actions, name, summary)
        action.add_argument(
            "which", metavar="JOB", help="a run's id or a unique part of it; last: the newest"
        )
        if name == "priority":
            action.add_argument("number", metavar="N", type=priority)
        action.set_defaults(run=run)
    restore = parsers.add_action(
        actions,
        "restore",
        "submit your queued jobs again that a restart of the machine ended",
        more="Jobs that were running are not restarted; resume them with muster train --resume.",
        examples=[
            "muster queue restore",
            f"muster queue restore --unit > {_UNIT_PATH}",
        ],
    )
    restore.add_argument(
        "--unit", action="store_true", help="print a systemd user unit that does this at boot"
    )
    restore.set_defaults(run=_run_restore)


@dataclass(frozen=True, kw_only=True)
class _Queue:
    """The queue as it is now."""

    node: Node
    claims: Mapping[str, Claim]
    plan: QueuePlan
    starts: Mapping[str, float]
    beyond_share: tuple[WaitingRequest, ...]

    @property
    def jobs(self) -> tuple[WaitingRequest, ...]:
        """All requests in their order; those beyond the share of their owner come last."""
        return (*self.plan.order, *self.beyond_share)

    def may_start(self, one: WaitingRequest) -> bool:
        """Return whether a request only waits for GPUs."""
        return one.job.may_start and one.responds and one not in self.beyond_share


def _look_queue() -> _Queue:
    node, now = snapshot.take_snapshot_with_history(), time.time()
    claims = Claims.here(os.environ)
    claimed = claims.glance(one.uuid for one in node.accelerators).claimed
    tickets = read_tickets(claims.queue)
    shares = read_shares(os.environ).value
    requests = [one for one in tickets if is_within_share(one, claimed, shares)]
    weights = shares.weights(one.user for one in requests) if shares else None
    plan = plan_queue(node, requests, claimed, now_unix_s=now, shares=weights)
    known = {uuid: _with_expected_end(claim) for uuid, claim in claimed.items()}
    starts = expected_starts(node, requests, known, now_unix_s=now, shares=weights)
    beyond = tuple(one for one in tickets if one not in requests)
    return _Queue(node=node, claims=claimed, plan=plan, starts=starts, beyond_share=beyond)


def _with_expected_end(claim: Claim) -> Claim:
    """Return the claim with the end that the progress of its run shows, if that is earlier than its limit."""
    end = expected_end(RunFolder(Path(claim.run))) if claim.run else None
    if end is None or (claim.ends_unix_s is not None and claim.ends_unix_s < end):
        return claim
    return replace(claim, ends_unix_s=end)


def _run_list(options: argparse.Namespace) -> int:
    queue = _look_queue()
    if options.json:
        output.print_json(
            [_queue_as_json(queue, place, one) for place, one in enumerate(queue.jobs, 1)]
        )
        return ExitCode.GOOD
    if not queue.jobs:
        output.print_text("nothing waits for GPUs; to add a job: muster run --queue --num-gpus 1 …")
        return ExitCode.GOOD
    table: list[tuple[str, ...]] = [
        ("", "job", "owner", "wants", "waiting", "starts", "why it waits")
    ]
    table += [_queue_cells(queue, place, one) for place, one in enumerate(queue.jobs, 1)]
    widths = [max(len(row[column]) for row in table) for column in range(6)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        output.print_text("  ".join([*cells, row[6]]).rstrip())
    return ExitCode.GOOD


def _queue_cells(queue: _Queue, place: int, one: WaitingRequest) -> tuple[str, ...]:
    now = queue.node.taken_unix_s
    return (
        str(place) if queue.may_start(one) else "-",
        _job_name(one),
        one.user,
        plural(one.request.wanted, "GPU"),
        format_seconds(max(0.0, now - one.job.since_unix_s)),
        _start_text(queue, one),
        _why_it_waits(queue, one),
    )


def _job_name(one: WaitingRequest) -> str:
    return printable([Path(one.job.run).name]) if one.job.run else f"pid {one.pid}"


def _start_text(queue: _Queue, one: WaitingRequest) -> str:
    start = queue.starts.get(one.ticket)
    if start is None:
        return "unknown" if one.job.may_start else "-"
    left_s = start - queue.node.taken_unix_s
    return "now" if left_s < 1 else f"in {format_seconds(left_s)}"


def _why_it_waits(queue: _Queue, one: WaitingRequest) -> str:
    if not one.responds:
        return "its process does not respond"
    if one.job.held:
        return "held by its owner"
    if one.job.after:
        return f"waits for {', '.join(one.job.after)}"
    if one in queue.beyond_share:
        return f"{one.user} has no GPUs left of their share"
    if one.ticket in queue.plan.grants:
        return "starts now"
    kept = queue.plan.reservation
    taken = queue.plan.unavailable.get(one.ticket, {})
    free = sum(device.uuid not in taken for device in queue.node.accelerators)
    text = f"{free} of {plural(one.request.wanted, 'GPU')} available"
    if kept is None:
        return text
    if kept.ticket != one.ticket:
        return f"{text}, {len(kept.uuids)} reserved for the first in the queue"
    at = "" if kept.at_unix_s is None else f" from {_clock(kept.at_unix_s)}"
    return f"{text}, {len(kept.uuids)} reserved{at}"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%a %H:%M")


def _queue_as_json(queue: _Queue, place: int, one: WaitingRequest) -> dict[str, Any]:
    return {
        "position": place if queue.may_start(one) else None,
        "job": Path(one.job.run).name if one.job.run else None,
        "folder": one.job.run or None,
        "name": one.job.name or None,
        "pid": one.pid,
        "owner": one.user,
        "gpus": one.request.wanted,
        "waiting_since_unix_s": one.job.since_unix_s,
        "expected_start_unix_s": queue.starts.get(one.ticket),
        "time_limit_s": one.job.lasts_s,
        "priority": one.job.priority,
        "held": one.job.held,
        "after": list(one.job.after),
        "why": _why_it_waits(queue, one),
    }


def _own_job(which: str) -> RunFolder:
    """Find a queued job of this user. Only tickets whose file belongs to this user count: others may name any folder."""
    tickets = read_tickets(Claims.here(os.environ).queue)
    queued = [one for one in tickets if one.job.run]
    own = [one for one in queued if one.uid == os.geteuid()]
    if which == "last":
        matches = sorted(own, key=lambda one: one.job.since_unix_s)[-1:]
    else:
        exact = [one for one in own if Path(one.job.run).name == which]
        matches = exact or [one for one in own if which in Path(one.job.run).name]
    if len(matches) == 1:
        run = RunFolder(Path(matches[0].job.run))
        refuse_foreign(run, "change")
        return run
    others = [one for one in queued if one.uid != os.geteuid() and which in Path(one.job.run).name]
    if not matches and others and which != "last":
        raise Impossible(
            f"{_job_name(others[0])} belongs to {others[0].user}",
            why="only its owner can change a job",
            fix=f"ask {others[0].user}",
        )
    raise Impossible(
        f"you have no job {which!r} in the queue"
        if not matches
        else f"job {which!r} is not unique",
        why="your jobs in the queue: " + (", ".join(map(_job_name, own)) or "none"),
        fix="muster queue  # lists the queue",
    )


def _run_cancel(options: argparse.Namespace) -> int:
    from torchmuster.cli.stop import stop_run

    return stop_run(_own_job(options.which))


def _run_hold(options: argparse.Namespace) -> int:
    run = _own_job(options.which)
    queue_entry.change_queue_entry(run, held=True)
    output.say(f"muster: {run.id} is held; to let it start: muster queue release {run.id}")
    return ExitCode.GOOD


def _run_release(options: argparse.Namespace) -> int:
    run = _own_job(options.which)
    queue_entry.change_queue_entry(run, held=False)
    output.say(f"muster: {run.id} is released; its waiting time counts from now on")
    return ExitCode.GOOD


def _run_priority(options: argparse.Namespace) -> int:
    run = _own_job(options.which)
    queue_entry.change_queue_entry(run, priority=options.number)
    output.say(f"muster: {run.id} has priority {options.number} among your jobs")
    return ExitCode.GOOD


def _run_restore(options: argparse.Namespace) -> int:
    command = shlex.join([sys.executable, "-m", "torchmuster"])
    if options.unit:
        output.print_text(_UNIT.format(command=command), end="")
        output.say(
            f"muster: write this to {_UNIT_PATH}, then:\n"
            "        systemctl --user enable muster-queue.service\n"
            f"        loginctl enable-linger {shlex.quote(user_of_this_process())}"
            "  # starts your services at boot, without a login"
        )
        return ExitCode.GOOD
    code = ExitCode.GOOD
    waiting = [one for one in queue_entry.read_submissions() if _is_restorable(one.run)]
    for one in waiting:
        done = subprocess.run(
            [sys.executable, "-m", "torchmuster", *one.arguments],
            cwd=one.folder,
            env={**os.environ, **one.environment},
            check=False,
        )
        if done.returncode != ExitCode.GOOD:
            output.say(f"muster: {one.run.id} was not submitted again")
            code = ExitCode.FAILED
    output.say(f"muster: {plural(len(waiting), 'job')} submitted again")
    return code


def _is_restorable(run: RunFolder) -> bool:
    """Return whether a job was still queued when its launcher was ended; forget those whose folder is gone."""
    if not run.marker.is_file():
        queue_entry.forget_submission(run)
        return False
    job = run_state.read_job(run)
    if job is not None and job.launcher.process() is not None:
        return False
    return untrusted.read_json_object(run.state).get("phase") in (
        None,
        "queued",
        "stopped",
        "failed",
    )
