"""The failure report of a run, read from its folder alone: root cause, secondary errors, files to read.

The only process it needs is the launcher, and only to see whether it is alive. So the report works while the run
is active, after it, after everything was killed, and on another host.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
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
from torchmuster.launch.launcher.console import rank_text
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_LOST_NAMED = 5
_LOGS_NAMED = 8
_LOGS_READ = 16
_LOG_BYTES = 64 * 1024
# The path of the run folder at the time of writing does not matter to the reader.
_PATH_INSIDE = re.compile(r"(?<![\w/])/\S*/((?:logs/rank-|hang/\d+|checkpoints/)\S*)")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The report of a run, root cause first; ``files`` are names within its folder."""

    record: RunRecord
    findings: tuple[Finding, ...]
    files: tuple[str, ...]


def failure_report_of(run: RunFolder) -> FailureReport:
    """Read a run folder and return its failure report."""
    record = RunRecord.of(run)
    findings = [_with_names_inside(finding) for finding in _findings(record)]
    return FailureReport(
        record=record,
        findings=(*findings, *_to_resume(record)),
        files=tuple(_files(record)),
    )


def _findings(record: RunRecord) -> Iterator[Finding]:
    state = record.state
    if state is None:
        yield _unknown()
        yield from _last_troubles(record)
        return
    match state.phase:
        case "finished":
            yield _finished(record, state)
            yield from _lost(record)
        case "failed":
            yield _failed(record, state)
        case "saved":
            words = state.headline or "checkpointed after a stop request"
            yield Finding(name="run-saved", status=Status.OK, what=words, fix=_how_to_go_on(record))
            yield from _killed(record, state)
        case "stopped":
            yield Finding(name="run-stopped", status=Status.NOTE, what=state.headline)
            yield from _killed(record, state)
            yield from _last_troubles(record)
        case "died":
            yield _died(record, state)
            yield from _last_troubles(record)
        case _:
            yield _active(record, state)
            if record.hang_now is not None:
                yield _of_hang(record.hang_now)


def _killed(record: RunRecord, state: run_state.RunState) -> Iterator[Finding]:
    """Return the ranks that had to be killed after the stop request, as they were reported."""
    if not state.killed_ranks:
        return
    told = [one.facts for one in record.events if one.name == "ranks-killed"]
    facts = told[-1] if told else {"what": f"{rank_text(state.killed_ranks)} had to be killed"}
    what, why, fix = (str(facts.get(name, "")) for name in ("what", "why", "fix"))
    yield Finding(name="ranks-killed", status=Status.WARNING, what=what, why=why, fix=fix)


def _finished(record: RunRecord, state: run_state.RunState) -> Finding:
    took = format_seconds(max(0.0, state.since_unix_s - state.started_unix_s))
    resumed = " after it was resumed" if record.was_resumed else ""
    return Finding(
        name="run-finished",
        status=Status.OK,
        what=f"{state.headline or 'finished'} in {took}{resumed}{_after_failures(record)}",
    )


def _lost(record: RunRecord) -> Iterator[Finding]:
    """Return the saves that failed: a finished run may have fewer checkpoints than its user expects."""
    if steps := lost_saves(record.run.metrics):
        named = ", ".join(map(str, steps[:_LOST_NAMED]))
        more = f" and {len(steps) - _LOST_NAMED} more" if len(steps) > _LOST_NAMED else ""
        yield Finding(
            name="checkpoints-missing",
            status=Status.WARNING,
            what=f"{plural(len(steps), 'checkpoint')} of this run could not be saved: step {named}{more}",
            why="the training continued without them",
            fix=f"muster checkpoint list {record.run.path}   # what was saved; then free disk space before the next run",
        )


def _failed(record: RunRecord, state: run_state.RunState) -> Finding:
    """Return the last attempt's root cause, with other records from the folder."""
    if record.last_failure is None:
        finding = Finding(name="run-failed", status=Status.FAILURE, what=state.headline)
        if not record.failures:
            return _explained(finding, _known_in(_logs(record.run)))
        before = f"before that: {record.failures[-1].finding.what}"
        return dataclasses.replace(finding, why=before, fix="see console.log in the run folder")
    finding = record.last_failure.finding
    why = [finding.why]
    if earlier := record.failures[:-1]:
        why.append(
            f"{plural(len(earlier), 'attempt')} had failed before: {earlier[-1].finding.what}"
        )
    hang = record.hang_now
    if hang is not None and finding.name not in messages.NAMES.values():
        why.append(f"reported shortly before: {hang.finding.what}")
    said = [one.what for one in hang.analysis] if hang is not None else []
    return dataclasses.replace(
        finding, why=_joined(why), evidence=_joined([finding.evidence, *said])
    )


def _died(record: RunRecord, state: run_state.RunState) -> Finding:
    job = record.job
    phases = [event.name for event in record.events if event.name in run_state.ACTIVE]
    was = f"the run was {phases[-1]}; " if phases else ""
    if job is not None and not job.launcher.is_of_this_machine:
        return _not_heard_of(record, state, job.launcher.host, was)
    left = f"muster stop {record.run.path}   # stops any remaining processes"
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"{state.headline}{f' on {job.launcher.host}' if job else ''}, and its ranks were stopped",
        why=f"{was}the launcher logged no error, so it was killed: by kill -9, the out-of-memory killer, or "
        "a reboot of the host",
        fix=_joined(
            ["journalctl and dmesg there show what killed it", left, _how_to_go_on(record)]
        ),
    )


def _not_heard_of(record: RunRecord, state: run_state.RunState, host: str, was: str) -> Finding:
    there = f"on {host}, if it is up: muster stop {record.run.path}"
    return Finding(
        name="launcher-gone",
        status=Status.FAILURE,
        what=state.headline.replace("the launcher", f"the launcher on {host}"),
        why=f"{was}that host is down or lost access to this disk, or this folder is an older copy",
        fix=_joined([there, _how_to_go_on(record)]),
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
        why=f"the launcher runs on {host} and cannot be checked from here; the newest file in the run folder "
        f"is {_age_of_newest(record.run)} old",
        fix=f"on {host}: muster explain {record.run.id}",
    )


def _unknown() -> Finding:
    return Finding(
        name="run-unknown",
        status=Status.NOTE,
        what="the run folder does not contain the state of the run",
        why="state.json is missing or unreadable: the run never started, or its folder was copied only in part",
        fix="see console.log and logs/ in the run folder",
    )


def _last_troubles(record: RunRecord) -> Iterator[Finding]:
    """Return the last known problems of a run that ended without a root cause."""
    hang = record.hang_now
    if hang is not None:
        yield _of_hang(hang)
    for failed in record.failures[-1:]:
        what = f"attempt {failed.attempt + 1} had failed: {failed.finding.what}"
        yield dataclasses.replace(failed.finding, status=Status.WARNING, what=what)
    stopped = record.state is not None and record.state.phase == "stopped"
    if hang is None and not record.failures and not stopped:
        yield from _known_in(_logs(record.run))[:2]


def _of_hang(hang: evidence.HangRecord) -> Finding:
    """Return a hang as it was reported, with the analysis of the flight recorders."""
    said = [one.what for one in hang.analysis]
    return dataclasses.replace(hang.finding, evidence=_joined([hang.finding.evidence, *said]))


def _how_to_go_on(record: RunRecord) -> str:
    ours = record.job is not None and record.job.typed[:1] == ["train"]
    resume = f"muster train --resume {record.run.path}   # resumes from its newest valid checkpoint"
    return resume if ours else ""


def _to_resume(record: RunRecord) -> Iterator[Finding]:
    """Yield from which checkpoint the user's script can resume, if it did not finish."""
    state, job = record.state, record.job
    if state is None or job is None or state.active or state.phase == "finished":
        return
    with contextlib.suppress(OSError):
        if finding := resume_finding(job, plan_resume(job, record.run.metrics)):
            yield finding
            return
    if state.resume:  # a copy of the folder, without the checkpoints
        yield Finding(
            name="checkpoint-to-resume",
            status=Status.NOTE,
            what="the script could be resumed when the run ended",
            why="its checkpoints are not accessible from this host",
            fix=state.resume,
        )


def _after_failures(record: RunRecord) -> str:
    failed = len(record.failures) + len(record.unexplained_restarts)
    return f", after {plural(failed, 'failed attempt')}" if failed else ""


# ---- logs


def _files(record: RunRecord) -> Iterator[str]:
    """Return the names of the files to read, the most relevant first."""
    run = record.run
    guilty = [one.rank for failed in record.failures[-1:] for one in failed.ranks]
    logs = [run.rank_log(rank) for rank in guilty] or sorted(run.logs.glob("rank-*.log"))
    kept = [path for hang in record.hangs[-1:] for path in hang.files]
    for path in dict.fromkeys([*kept, *logs[:_LOGS_NAMED], run.console]):
        if path.exists():
            yield path.relative_to(run.path).as_posix()


def _explained(finding: Finding, known: Sequence[Finding]) -> Finding:
    """Add the explanation of error texts in the logs to a finding without one."""
    if not known:
        return finding
    first = known[0]
    return dataclasses.replace(finding, why=first.what, fix=first.fix, evidence=first.evidence)


def _logs(run: RunFolder) -> list[Path]:
    """Return the existing rank logs, newest first, then the launcher's console log."""
    found = [*run.logs.glob("rank-*.log")]
    with contextlib.suppress(OSError):
        found.sort(key=lambda path: -path.stat().st_mtime)
    return [*found[:_LOGS_READ], run.console]


def _known_in(logs: Sequence[Path]) -> list[Finding]:
    """Return explanations of the error texts in logs, causes before secondary errors."""
    found: dict[str, Explanation] = {}
    for path in logs:
        for one in explain_text(_end_of(path)):
            if one.role is not Role.ASIDE:
                found.setdefault(one.name, one)
    return [explanation_finding(one) for one in sorted(found.values(), key=lambda one: one.role)]


def _end_of(path: Path) -> str:
    try:
        with untrusted.open_regular(path) as stream:
            stream.seek(max(0, stream.seek(0, 2) - _LOG_BYTES))
            return stream.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except (OSError, untrusted.Unreadable):
        return ""


def _age_of_newest(run: RunFolder) -> str:
    newest = 0.0
    for path in (run.state, run.console, *run.logs.glob("rank-*.log")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return format_seconds(max(0.0, time.time() - newest))


def _with_names_inside(finding: Finding) -> Finding:
    """Replace absolute paths with paths relative to the run folder."""
    return dataclasses.replace(
        finding,
        why=_PATH_INSIDE.sub(r"\1", finding.why),
        evidence=_PATH_INSIDE.sub(r"\1", finding.evidence),
    )


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part)
