"""The failure report of a run, read from its folder alone: root cause, secondary errors, files to read.

The only process it needs is the launcher, and only to see whether it is alive. So the report works while the run
is active, after it, after everything was killed, and on another host.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchmuster import untrusted
from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import Explanation, explain_text, explanation_finding
from torchmuster.known_errors.rule import Role
from torchmuster.launch.hangs import messages
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.resume import plan_resume, resume_finding
from torchmuster.launch.history.run_record import RunRecord
from torchmuster.launch.history.script_checkpoints import lost_saves
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_STEPS_SHOWN = 5
_LOGS_SHOWN = 8
_LOGS_READ = 16
_LOG_BYTES = 64 * 1024
# The path of the run folder at the time of writing does not matter to the reader.
_PATH_INSIDE = re.compile(r"(?<![\w/])/\S*/((?:logs/rank-|hang/\d+|checkpoints/)\S*)")
_UNKNOWN = Finding(
    name="run-unknown",
    status=Status.NOTE,
    what="the run folder does not contain the state of the run",
    why="state.json is missing or unreadable: the run never started, or its folder was copied only in part",
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
    findings = []
    for finding in _findings(record):
        evidence = _PATH_INSIDE.sub(r"\1", finding.evidence)
        findings.append(dataclasses.replace(finding, evidence=evidence))
    to_resume = _to_resume(record)
    if to_resume is not None:
        findings.append(to_resume)
    return FailureReport(record=record, findings=tuple(findings), files=tuple(_files(record)))


def _findings(record: RunRecord) -> Iterator[Finding]:
    state = record.state
    if state is None:
        yield _UNKNOWN
        yield from _last_troubles(record)
        return
    match state.phase:
        case "finished":
            yield _finished(record, state)
            yield from _lost_checkpoints(record)
        case "failed":
            yield _failed(record, state)
        case "saved":
            what = state.headline or "checkpointed after a stop request"
            fix = _resume_training(record)
            yield Finding(name="run-saved", status=Status.OK, what=what, fix=fix)
            yield from _killed_ranks(record)
        case "stopped":
            yield Finding(name="run-stopped", status=Status.NOTE, what=state.headline)
            yield from _killed_ranks(record)
            yield from _last_troubles(record)
        case "died":
            yield _died(record, state)
            yield from _last_troubles(record)
        case _:
            yield _active(record, state)
            if record.hang is not None:
                yield _with_analysis(record.hang)


def _finished(record: RunRecord, state: run_state.RunState) -> Finding:
    what = state.headline or "finished"
    what += f" in {format_seconds(max(0.0, state.since_unix_s - state.started_unix_s))}"
    if record.was_resumed:
        what += " after it was resumed"
    return Finding(name="run-finished", status=Status.OK, what=what + _after_failures(record))


def _lost_checkpoints(record: RunRecord) -> Iterator[Finding]:
    """Return the saves that failed: a finished run may have fewer checkpoints than its user expects."""
    steps = lost_saves(record.run.metrics)
    if not steps:
        return
    listed = ", ".join(map(str, steps[:_STEPS_SHOWN]))
    if len(steps) > _STEPS_SHOWN:
        listed += f" and {len(steps) - _STEPS_SHOWN} more"
    yield Finding(
        name="checkpoints-missing",
        status=Status.WARNING,
        what=f"{plural(len(steps), 'checkpoint')} of this run could not be saved: step {listed}",
        why="the training continued without them",
        fix=f"muster checkpoint list {record.run.path}   # what was saved; then free disk space before the next run",
    )


def _killed_ranks(record: RunRecord) -> Iterator[Finding]:
    """Return the ranks that had to be killed after the stop request, as they were reported."""
    reports = [event.facts for event in record.events if event.name == "ranks-killed"]
    if reports and record.state is not None and record.state.killed_ranks:
        facts = reports[-1]
        yield Finding(
            name="ranks-killed",
            status=Status.WARNING,
            what=str(facts.get("what", "")),
            why=str(facts.get("why", "")),
            fix=str(facts.get("fix", "")),
        )


def _failed(record: RunRecord, state: run_state.RunState) -> Finding:
    """Return the last attempt's root cause, with other records from the folder."""
    failure = record.last_failure
    if failure is None:  # no rank was started after the last recorded one
        before = f"before that: {record.failures[-1].finding.what}" if record.failures else ""
        fix = "see console.log in the run folder" if before else ""
        return Finding(
            name="run-failed", status=Status.FAILURE, what=state.headline, why=before, fix=fix
        )
    finding = failure.finding
    why = [finding.why]
    earlier = record.failures[:-1]
    if earlier:
        count = plural(len(earlier), "attempt")
        why.append(f"{count} had failed before: {earlier[-1].finding.what}")
    if record.hang is None:
        return dataclasses.replace(finding, why=_lines(*why))
    if finding.name not in messages.NAMES.values():
        why.append(f"reported shortly before: {record.hang.finding.what}")
    analysis = [found.what for found in record.hang.analysis]
    return dataclasses.replace(
        finding, why=_lines(*why), evidence=_lines(finding.evidence, *analysis)
    )


def _died(record: RunRecord, state: run_state.RunState) -> Finding:
    phases = [event.name for event in record.events if event.name in run_state.ACTIVE]
    phase = f"the run was {phases[-1]}; " if phases else ""
    resume = _resume_training(record)
    if record.job is not None and not record.job.launcher.is_of_this_machine:
        host = record.job.launcher.host
        return Finding(
            name="launcher-gone",
            status=Status.FAILURE,
            what=state.headline.replace("the launcher", f"the launcher on {host}"),
            why=f"{phase}that host is down or lost access to this disk, or this folder is an older copy",
            fix=_lines(f"on {host}, if it is up: muster stop {record.run.path}", resume),
        )
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"{state.headline}, and its ranks were stopped",
        why=f"{phase}the launcher logged no error, so it was killed: by kill -9, the out-of-memory killer, or "
        "a reboot of the host",
        fix=_lines("journalctl and dmesg there show what killed it", resume),
    )


def _active(record: RunRecord, state: run_state.RunState) -> Finding:
    job = record.job
    if job is not None and job.launcher.is_of_this_machine:
        since = format_seconds(max(0.0, time.time() - state.started_unix_s))
        what = f"{state.phase}; launched {since} ago{_after_failures(record)}"
        return Finding(name="run-active", status=Status.OK, what=what)
    host = job.launcher.host if job else "another host"
    return Finding(
        name="run-active",
        status=Status.NOTE,
        what=f"{state.phase} at its last heartbeat{_after_failures(record)}",
        why=f"the launcher runs on {host} and cannot be checked from here; that heartbeat is "
        f"{format_seconds(run_state.silent_for_s(record.run.state))} old",
        fix=f"on {host}: muster explain {record.run.id}",
    )


def _last_troubles(record: RunRecord) -> Iterator[Finding]:
    """Return the last known problems of a run that ended without a root cause."""
    if record.hang is not None:
        yield _with_analysis(record.hang)
    for failed in record.failures[-1:]:
        what = f"attempt {failed.attempt + 1} had failed: {failed.finding.what}"
        yield dataclasses.replace(failed.finding, status=Status.WARNING, what=what)
    was_stopped = record.state is not None and record.state.phase == "stopped"
    if record.hang is None and not record.failures and not was_stopped:
        yield from _known_errors(record.run)[:2]


def _with_analysis(hang: evidence.HangRecord) -> Finding:
    """Return a hang as it was reported, with the analysis of the flight recorders."""
    analysis = [finding.what for finding in hang.analysis]
    return dataclasses.replace(hang.finding, evidence=_lines(hang.finding.evidence, *analysis))


def _resume_training(record: RunRecord) -> str:
    """Return the command that resumes a run of ``muster train``; "" for the user's own script."""
    if record.job is None or record.job.typed[:1] != ["train"]:
        return ""
    return f"muster train --resume {record.run.path}   # resumes from its newest valid checkpoint"


def _to_resume(record: RunRecord) -> Finding | None:
    """Return from which checkpoint the user's script can resume, if it did not finish."""
    state, job = record.state, record.job
    if state is None or job is None or state.active or state.phase == "finished":
        return None
    with contextlib.suppress(OSError):
        finding = resume_finding(job, plan_resume(job, record.run.metrics))
        if finding is not None:
            return finding
    if not state.resume:
        return None
    return Finding(  # for a copy of the folder, without the checkpoints
        name="checkpoint-to-resume",
        status=Status.NOTE,
        what="the script could be resumed when the run ended",
        why="its checkpoints are not accessible from this host",
        fix=state.resume,
    )


def _after_failures(record: RunRecord) -> str:
    count = run_state.EventSummary.of(record.events).restarts
    return f", after {plural(count, 'failed attempt')}" if count else ""


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))


# ---- files


def _files(record: RunRecord) -> Iterator[str]:
    """Return the names of the files to read, the most relevant first."""
    run = record.run
    paths: list[Path] = []
    for hang in record.hangs[-1:]:
        paths += hang.files
    failed_ranks = record.failures[-1].ranks if record.failures else ()
    logs = [run.rank_log(rank) for rank in failed_ranks] or _rank_logs(run)
    paths += logs[:_LOGS_SHOWN]
    for path in dict.fromkeys([*paths, run.console]):
        if path.exists():
            yield path.relative_to(run.path).as_posix()


def _rank_logs(run: RunFolder) -> list[Path]:
    return sorted(run.logs.glob("rank-*.log"))


def _known_errors(run: RunFolder) -> list[Finding]:
    """Return explanations of the error texts in the logs, causes before secondary errors; newer logs first."""
    logs = _rank_logs(run)
    with contextlib.suppress(OSError):
        logs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    explanations: dict[str, Explanation] = {}
    for path in [*logs[:_LOGS_READ], run.console]:
        for explanation in explain_text(_end_of(path)):
            if explanation.role is not Role.ASIDE:
                explanations.setdefault(explanation.name, explanation)
    by_role = sorted(explanations.values(), key=lambda explanation: explanation.role)
    return list(map(explanation_finding, by_role))


def _end_of(path: Path) -> str:
    try:
        with untrusted.open_regular(path) as stream:
            stream.seek(max(0, stream.seek(0, 2) - _LOG_BYTES))
            return stream.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except (OSError, untrusted.Unreadable):
        return ""
