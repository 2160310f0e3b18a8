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
from torchmuster.launch.history.script_checkpoints import (
    ScriptCheckpoint,
    lost_saves,
    read_script_checkpoints,
)
from torchmuster.launch.launcher.console import rank_text
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_SAME_LAUNCH_S = 5.0  # a launch writes its first event and its state this close together
_NO_HANG_SINCE = ("hang-over", "submitted", "waiting", "joining", "starting")
_LINES_SHOWN = 14
_LOST_NAMED = 5
_FIRST_LINES = 5
_LONGEST_LINE = 200


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One line of the timeline."""

    at_unix_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything recorded of a run; missing or truncated parts are left out."""

    run: RunFolder
    job: run_state.RunJob | None
    state: run_state.RunState | None
    events: tuple[run_state.RunEvent, ...]
    failures: tuple[evidence.FailedAttempt, ...]
    hangs: tuple[evidence.HangRecord, ...]
    checkpoints: tuple[ScriptCheckpoint, ...] = ()  # of the user's script, newest first

    @classmethod
    def of(cls, run: RunFolder) -> "Timeline":
        """Read a run's folder."""
        return cls(
            run=run,
            job=run_state.read_job(run),
            state=run_state.read_state(run),
            events=tuple(run_state.read_events(run)),
            failures=tuple(evidence.read_failures(run)),
            hangs=tuple(evidence.read_hangs(run)),
            checkpoints=tuple(read_script_checkpoints(run.metrics)),
        )

    @property
    def was_resumed(self) -> bool:
        """Whether the run's state counts from a later launch than its first."""
        started = self.state.started_unix_s if self.state is not None else None
        if started is None or not self.events:
            return False
        return self.events[0].at_unix_s < started - _SAME_LAUNCH_S

    @property
    def hang_now(self) -> evidence.HangRecord | None:
        """The last reported hang, unless it was reported as over or another attempt has started since."""
        ends = [one for one in self.events if one.name in _NO_HANG_SINCE]
        after = max((one.at_unix_s for one in ends), default=0.0)
        return next((one for one in self.hangs[-1:] if one.at_unix_s >= after), None)

    @property
    def verdict(self) -> evidence.FailedAttempt | None:
        """The failure that ended the run; None if none was recorded.

        A failure of an earlier launch in the same folder does not count.
        """
        last, state = self.failures[-1] if self.failures else None, self.state
        if last is None or state is None or last.at_unix_s < state.started_unix_s:
            return None
        what = last.finding.what.partition("\n")[0]
        return last if what in state.headline or not state.headline else None

    @property
    def untold_restarts(self) -> list[run_state.RunEvent]:
        """Restarts after a failure with no other record, such as a failure of the launcher itself."""
        found, since = [], 0.0
        for event in self.events:
            if event.name != run_state.RESTART:
                continue
            told = [one for one in self.failures if since < one.at_unix_s <= event.at_unix_s]
            if all(one.finding.what != event.facts.get("headline") for one in told):
                found.append(event)
            since = event.at_unix_s
        return found

    def moments(self) -> list[TimelineEvent]:
        """Return the events in chronological order."""
        return sorted(self._moments(), key=lambda one: one.at_unix_s)

    def _moments(self) -> Iterator[TimelineEvent]:
        state = self.state
        if state is not None:
            words = printable(self.job.shown) if self.job else "unknown command"
            yield TimelineEvent(at_unix_s=state.started_unix_s, what=f"launched: {words}")
        for event in self.events:
            if words := _event_words(event):
                yield TimelineEvent(at_unix_s=event.at_unix_s, what=words)
        for event in self.untold_restarts:
            yield TimelineEvent(at_unix_s=event.at_unix_s, what=_restart_words(event))
        for failed in self.failures:
            words = (
                f"attempt {failed.attempt + 1} failed: {_failure_report_line(failed.finding.what)}"
            )
            yield TimelineEvent(at_unix_s=failed.at_unix_s, what=words)
        yield from self._saves()
        told = bool(self.events) and state is not None and self.events[-1].name == state.phase
        if state is not None and not state.active and not told:
            words = f"{state.phase}: {_failure_report_line(state.headline)}"
            yield TimelineEvent(at_unix_s=state.since_unix_s, what=words)

    def _saves(self) -> Iterator[TimelineEvent]:
        with contextlib.suppress(Exception):  # another command reports damaged ones
            from torchmuster.checkpoints.manifest import committed_manifests
            from torchmuster.checkpoints.store import FolderStore

            kept = committed_manifests(FolderStore(self.run.checkpoints))
            for newest in kept[:1]:
                count = len(kept) - 1
                older = f"; {plural(count, 'older checkpoint')} kept" if count else ""
                words = f"saved step {newest.step}: checkpoints/{newest.name}{older}"
                yield TimelineEvent(at_unix_s=newest.made_unix_s, what=words)
        for saved in self.checkpoints[:1]:
            count = len(self.checkpoints) - 1
            before = f"; {plural(count, 'earlier checkpoint')}" if count else ""
            words = f"saved step {saved.step:,}: {saved.path} ({saved.condition}){before}"
            yield TimelineEvent(at_unix_s=saved.at_unix_s, what=words)


def timeline_text(moments: Sequence[TimelineEvent]) -> list[str]:
    """Return the timeline as text lines with times; the middle of a long one is left out."""
    if not moments:
        return []
    first = moments[0].at_unix_s
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.at_unix_s))}"
        f"  {'+' + format_seconds(max(0.0, one.at_unix_s - first)):>8}  {one.what}"
        for one in moments
    ]
    if len(lines) > _LINES_SHOWN:
        last = _LINES_SHOWN - _FIRST_LINES - 1
        left_out = f"… {len(lines) - _FIRST_LINES - last} more …"
        lines = [*lines[:_FIRST_LINES], left_out, *lines[-last:]]
    return lines


def failure_text(event: run_state.RunEvent) -> str:
    """Return the text of an event, including restarts; "" for intermediate phases."""
    return _restart_words(event) if event.name == run_state.RESTART else _event_words(event)


def _event_words(event: run_state.RunEvent) -> str:
    """Return the text of an event; "" for intermediate phases."""
    facts = event.facts
    match event.name:
        case "submitted" | "waiting" | "joining" | "starting" | "running":
            return ""
        case "started":
            count, attempt = facts.get("ranks"), facts.get("attempt")
            hosts = facts.get("hosts")
            where = f": {', '.join(map(str, hosts))}" if isinstance(hosts, list) else ""
            spares = facts.get("spares")
            if isinstance(spares, list):
                where += f"; spares: {', '.join(map(str, spares)) or 'none'}"
            again = f" (attempt {attempt + 1})" if isinstance(attempt, int) and attempt else ""
            return f"{count} rank{'' if count == 1 else 's'} started{where}{again}"
        case "finished" | "failed" | "stopped" | "saved":
            headline = _failure_report_line(str(facts.get("headline", "")))
            return headline if headline.startswith(event.name) else f"{event.name}: {headline}"
    return _failure_report_line(str(facts.get("what", "")))


def _restart_words(event: run_state.RunEvent) -> str:
    headline, step = (
        _failure_report_line(str(event.facts.get("headline", ""))),
        event.facts.get("from_step"),
    )
    where = f" from step {step:,}" if isinstance(step, int) else ""
    return f"{headline or 'it failed'}; restarted{where}"


def _failure_report_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


_LOGS_NAMED = 8
_LOGS_READ = 16
_LOG_BYTES = 64 * 1024
# The path of the run folder at the time of writing does not matter to the reader.
_PATH_INSIDE = re.compile(r"(?<![\w/])/\S*/((?:logs/rank-|hang/\d+|checkpoints/)\S*)")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The report of a run, root cause first; ``files`` are names within its folder."""

    story: Timeline
    findings: tuple[Finding, ...]
    files: tuple[str, ...]


def failure_report_of(run: RunFolder) -> FailureReport:
    """Read a run folder and return its failure report."""
    story = Timeline.of(run)
    findings = [_with_names_inside(one) for one in _failure_report_findings(story)]
    return FailureReport(
        story=story,
        findings=(*findings, *_to_resume(story)),
        files=tuple(_failure_report_files(story)),
    )


def _failure_report_findings(story: Timeline) -> Iterator[Finding]:
    state = story.state
    if state is None:
        yield _failure_report_unknown()
        yield from _last_troubles(story)
        return
    match state.phase:
        case "finished":
            yield _finished(story, state)
            yield from _lost(story)
        case "failed":
            yield _failed(story, state)
        case "saved":
            words = state.headline or "checkpointed after a stop request"
            yield Finding(name="run-saved", status=Status.OK, what=words, fix=_how_to_go_on(story))
            yield from _killed(story, state)
        case "stopped":
            yield Finding(name="run-stopped", status=Status.NOTE, what=state.headline)
            yield from _killed(story, state)
            yield from _last_troubles(story)
        case "died":
            yield _died(story, state)
            yield from _last_troubles(story)
        case _:
            yield _active(story, state)
            if story.hang_now is not None:
                yield _of_hang(story.hang_now)


def _killed(story: Timeline, state: run_state.RunState) -> Iterator[Finding]:
    """Return the ranks that had to be killed after the stop request, as they were reported."""
    if not state.killed_ranks:
        return
    told = [one.facts for one in story.events if one.name == "ranks-killed"]
    facts = told[-1] if told else {"what": f"{rank_text(state.killed_ranks)} had to be killed"}
    what, why, fix = (str(facts.get(name, "")) for name in ("what", "why", "fix"))
    yield Finding(name="ranks-killed", status=Status.WARNING, what=what, why=why, fix=fix)


def _finished(story: Timeline, state: run_state.RunState) -> Finding:
    took = format_seconds(max(0.0, state.since_unix_s - state.started_unix_s))
    resumed = " after it was resumed" if story.was_resumed else ""
    return Finding(
        name="run-finished",
        status=Status.OK,
        what=f"{state.headline or 'finished'} in {took}{resumed}{_after_failures(story)}",
    )


def _lost(story: Timeline) -> Iterator[Finding]:
    """Return the saves that failed: a finished run may have fewer checkpoints than its user expects."""
    if steps := lost_saves(story.run.metrics):
        named = ", ".join(map(str, steps[:_LOST_NAMED]))
        more = f" and {len(steps) - _LOST_NAMED} more" if len(steps) > _LOST_NAMED else ""
        yield Finding(
            name="checkpoints-missing",
            status=Status.WARNING,
            what=f"{plural(len(steps), 'checkpoint')} of this run could not be saved: step {named}{more}",
            why="the training continued without them",
            fix="muster checkpoint ls   # what was saved; then free disk space before the next run",
        )


def _failed(story: Timeline, state: run_state.RunState) -> Finding:
    """Return the last attempt's root cause, with other records from the folder."""
    if story.verdict is None:
        finding = Finding(name="run-failed", status=Status.FAILURE, what=state.headline)
        if not story.failures:
            return _explained(finding, _known_in(_logs(story.run)))
        before = f"before that: {story.failures[-1].finding.what}"
        return dataclasses.replace(finding, why=before, fix="see console.log in the run folder")
    finding = story.verdict.finding
    why = [finding.why]
    if earlier := story.failures[:-1]:
        why.append(
            f"{plural(len(earlier), 'attempt')} had failed before: {earlier[-1].finding.what}"
        )
    hang = story.hang_now
    if hang is not None and finding.name not in messages.NAMES.values():
        why.append(f"reported shortly before: {hang.finding.what}")
    said = [one.what for one in hang.analysis] if hang is not None else []
    return dataclasses.replace(
        finding, why=_joined(why), evidence=_joined([finding.evidence, *said])
    )


def _died(story: Timeline, state: run_state.RunState) -> Finding:
    job = story.job
    phases = [event.name for event in story.events if event.name in run_state.ACTIVE]
    was = f"the run was {phases[-1]}; " if phases else ""
    if job is not None and not job.launcher.is_of_this_machine:
        return _not_heard_of(story, state, job.launcher.host, was)
    left = f"muster stop {story.run.path}   # stops any remaining processes"
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"{state.headline}{f' on {job.launcher.host}' if job else ''}, and its ranks were stopped",
        why=f"{was}the launcher logged no error, so it was killed: by kill -9, the out-of-memory killer, or "
        "a reboot of the host",
        fix=_joined(["journalctl and dmesg there show what killed it", left, _how_to_go_on(story)]),
    )


def _not_heard_of(story: Timeline, state: run_state.RunState, host: str, was: str) -> Finding:
    there = f"on {host}, if it is up: muster stop {story.run.path}"
    return Finding(
        name="launcher-gone",
        status=Status.FAILURE,
        what=state.headline.replace("the launcher", f"the launcher on {host}"),
        why=f"{was}that host is down or lost access to this disk, or this folder is an older copy",
        fix=_joined([there, _how_to_go_on(story)]),
    )


def _active(story: Timeline, state: run_state.RunState) -> Finding:
    job = story.job
    if job is not None and job.launcher.is_of_this_machine:
        since = format_seconds(max(0.0, time.time() - state.started_unix_s))
        what = f"{state.phase}; launched {since} ago{_after_failures(story)}"
        return Finding(name="run-active", status=Status.OK, what=what)
    host = job.launcher.host if job else "another host"
    return Finding(
        name="run-active",
        status=Status.NOTE,
        what=f"{state.phase} at its last heartbeat{_after_failures(story)}",
        why=f"the launcher runs on {host} and cannot be checked from here; the newest file in the run folder "
        f"is {_age_of_newest(story.run)} old",
        fix=f"on {host}: muster explain {story.run.id}",
    )


def _failure_report_unknown() -> Finding:
    return Finding(
        name="run-unknown",
        status=Status.NOTE,
        what="the run folder does not contain the state of the run",
        why="state.json is missing or unreadable: the run never started, or its folder was copied only in part",
        fix="see console.log and logs/ in the run folder",
    )


def _last_troubles(story: Timeline) -> Iterator[Finding]:
    """Return the last known problems of a run that ended without a root cause."""
    hang = story.hang_now
    if hang is not None:
        yield _of_hang(hang)
    for failed in story.failures[-1:]:
        what = f"attempt {failed.attempt + 1} had failed: {failed.finding.what}"
        yield dataclasses.replace(failed.finding, status=Status.WARNING, what=what)
    stopped = story.state is not None and story.state.phase == "stopped"
    if hang is None and not story.failures and not stopped:
        yield from _known_in(_logs(story.run))[:2]


def _of_hang(hang: evidence.HangRecord) -> Finding:
    """Return a hang as it was reported, with the analysis of the flight recorders."""
    said = [one.what for one in hang.analysis]
    return dataclasses.replace(hang.finding, evidence=_joined([hang.finding.evidence, *said]))


def _how_to_go_on(story: Timeline) -> str:
    ours = story.job is not None and story.job.typed[:1] == ["train"]
    resume = f"muster train --resume {story.run.path}   # resumes from its newest valid checkpoint"
    return resume if ours else ""


def _to_resume(story: Timeline) -> Iterator[Finding]:
    """Yield from which checkpoint the user's script can resume, if it did not finish."""
    state, job = story.state, story.job
    if state is None or job is None or state.active or state.phase == "finished":
        return
    with contextlib.suppress(OSError):
        if finding := resume_finding(job, plan_resume(job, story.run.metrics)):
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


def _after_failures(story: Timeline) -> str:
    failed = len(story.failures) + len(story.untold_restarts)
    return f", after {plural(failed, 'failed attempt')}" if failed else ""


# ---- logs


def _failure_report_files(story: Timeline) -> Iterator[str]:
    """Return the names of the files to read, the most relevant first."""
    run = story.run
    guilty = [one.rank for failed in story.failures[-1:] for one in failed.ranks]
    logs = [run.rank_log(rank) for rank in guilty] or sorted(run.logs.glob("rank-*.log"))
    kept = [path for hang in story.hangs[-1:] for path in hang.files]
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
