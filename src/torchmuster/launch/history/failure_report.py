"""The failure report of a run, read from its folder alone: how it ended, why, and the files to read.

The only process it needs is the launcher, and only to see whether it is alive. So the report works while the run
is active, after it, after everything was killed, and on another host.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs import messages
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.resume import plan_resume, resume_finding
from torchmuster.launch.history.run_record import RunRecord
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_LOGS_SHOWN = 8
_UNKNOWN = Finding(
    name="run-unknown",
    status=Status.NOTE,
    what="the run folder does not contain the state of the run",
    why="events.jsonl is missing or unreadable: the run never started, or its folder was copied only in part",
    fix="see console.log and logs/ in the run folder",
)


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The report of a run, root cause first; ``files`` are names within its folder."""

    record: RunRecord
    findings: tuple[Finding, ...]
    files: tuple[str, ...]


def failure_report_of(run: RunFolder) -> FailureReport:
    """Read a run folder and return its failure report."""
    record = RunRecord.of(run)
    failures = evidence.read_failures(run)
    findings = [*_findings(record, failures)]
    to_resume = _to_resume(record)
    if to_resume is not None:
        findings.append(to_resume)
    files = tuple(_files(record, failures[-1].ranks if failures else ()))
    return FailureReport(record=record, findings=tuple(findings), files=files)


def _findings(record: RunRecord, failures: list[evidence.FailedAttempt]) -> Iterator[Finding]:
    state = record.state
    if state is None:
        yield _UNKNOWN
        return
    if state.phase == "failed":
        yield _failed(record, state)
        return
    match state.phase:
        case "finished":
            yield _finished(state)
        case "saved":
            fix = _resume_training(record)
            yield Finding(name="run-saved", status=Status.OK, what=state.headline, fix=fix)
        case "stopped":
            yield Finding(name="run-stopped", status=Status.NOTE, what=state.headline)
        case "died":
            yield _died(record, state)
        case _:
            yield _active(record, state)
    yield from _killed_ranks(record, state)
    if record.hang is not None:
        yield _with_analysis(record.hang)
    if failures and state.phase in ("stopped", "died"):  # what it may have died of
        last = failures[-1]
        what = f"attempt {last.attempt + 1} had failed: {last.finding.what}"
        yield dataclasses.replace(last.finding, status=Status.WARNING, what=what)


def _finished(state: run_state.RunState) -> Finding:
    what = state.headline
    what += f" in {format_seconds(max(0.0, state.since_unix_s - state.started_unix_s))}"
    if state.launches > 1:
        what += " after it was resumed"
    return Finding(name="run-finished", status=Status.OK, what=what + _after_failures(state))


def _failed(record: RunRecord, state: run_state.RunState) -> Finding:
    """Return the root cause, with the hang that was reported before it."""
    finding = state.finding
    if finding is None:
        finding = Finding(name="run-failed", status=Status.FAILURE, what=state.headline)
    why = [finding.why]
    if state.restarts:
        why.append(f"{plural(state.restarts, 'attempt')} had failed before")
    hang = record.hang
    if hang is None:
        return dataclasses.replace(finding, why=_lines(*why))
    if finding.name not in messages.NAMES.values():
        why.append(f"reported shortly before: {hang.finding.what}")
    analysis = [found.what for found in hang.analyse()]
    return dataclasses.replace(
        finding, why=_lines(*why), evidence=_lines(finding.evidence, *analysis)
    )


def _died(record: RunRecord, state: run_state.RunState) -> Finding:
    job, resume = record.job, _resume_training(record)
    if job is not None and not job.launcher.is_of_this_machine:
        host = job.launcher.host
        return Finding(
            name="launcher-gone",
            status=Status.FAILURE,
            what=state.headline.replace("the launcher", f"the launcher on {host}"),
            why="that host is down or lost access to this disk, or this folder is an older copy",
            fix=_lines(f"on {host}, if it is up: muster stop {record.run.path}", resume),
        )
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"{state.headline}, and its ranks were stopped",
        why="the launcher logged no error, so it was killed: by kill -9, the out-of-memory killer, or "
        "a reboot of the host",
        fix=_lines("journalctl and dmesg there show what killed it", resume),
    )


def _active(record: RunRecord, state: run_state.RunState) -> Finding:
    since = format_seconds(max(0.0, time.time() - state.started_unix_s))
    what = f"{state.phase}; launched {since} ago{_after_failures(state)}"
    job = record.job
    if job is not None and not job.launcher.is_of_this_machine:
        silent = format_seconds(run_state.silent_for_s(record.run.job))
        what += f"; the last heartbeat of the launcher on {job.launcher.host} is {silent} old"
    return Finding(name="run-active", status=Status.OK, what=what)


def _killed_ranks(record: RunRecord, state: run_state.RunState) -> Iterator[Finding]:
    """Return the ranks that had to be killed after the stop request, as they were reported."""
    if not state.killed_ranks:
        return
    reports = [event for event in record.events if event.name == run_state.RANKS_KILLED]
    finding = reports[-1].fact("finding", Finding) if reports else None
    if finding is not None:
        yield finding


def _with_analysis(hang: evidence.HangRecord) -> Finding:
    """Return a hang as it was reported, with the analysis of the flight recorders."""
    analysis = [finding.what for finding in hang.analyse()]
    return dataclasses.replace(hang.finding, evidence=_lines(hang.finding.evidence, *analysis))


def _resume_training(record: RunRecord) -> str:
    """Return the command that resumes a run of ``muster train``; "" for the user's own script."""
    if record.job is None or record.job.typed[:1] != ["train"]:
        return ""
    return f"muster train --resume {record.run.path}   # resumes from its newest valid checkpoint"


def _to_resume(record: RunRecord) -> Finding | None:
    """Return from which checkpoint the user's script can resume, if it did not finish."""
    state, job = record.state, record.job
    if state is None or job is None or state.active or state.phase == run_state.FINISHED:
        return None
    with contextlib.suppress(OSError):
        return resume_finding(job, plan_resume(job, record.run.metrics))
    return None


def _after_failures(state: run_state.RunState) -> str:
    return f", after {plural(state.restarts, 'failed attempt')}" if state.restarts else ""


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _files(record: RunRecord, failed_ranks: tuple[int, ...]) -> Iterator[str]:
    """Return the names of the files to read, the most relevant first."""
    run = record.run
    logs = [run.rank_log(rank) for rank in failed_ranks] or sorted(run.logs.glob("rank-*.log"))
    dumps = record.hang.files if record.hang is not None else []
    for path in [*dumps, *logs[:_LOGS_SHOWN], run.console]:
        if path.exists():
            yield path.relative_to(run.path).as_posix()
