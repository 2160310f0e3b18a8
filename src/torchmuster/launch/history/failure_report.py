"""The account of a run from its folder alone: the first cause, what follows from it, where to look.

Nothing is asked of any process but whether the launcher lives, so it can be given while the run goes on, after
it, after everything was killed, and on another machine.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import Explanation, explain_text, explanation_finding
from torchmuster.known_errors.rule import Role
from torchmuster.launch.hangs import messages
from torchmuster.launch.history import evidence, run_state
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_NO_HANG_SINCE = ("hang-over", "submitted", "joining", "starting")
_LINES_SHOWN = 14
_FIRST_LINES = 5
_LONGEST_LINE = 200


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """A line of the story."""

    at_unix_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that was written down of a run; what is missing or torn is left out."""

    run: RunFolder
    job: run_state.RunJob | None
    state: run_state.RunState | None
    events: tuple[run_state.RunEvent, ...]
    failures: tuple[evidence.FailedAttempt, ...]
    hangs: tuple[evidence.HangRecord, ...]

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
        )

    @property
    def hang_now(self) -> evidence.HangRecord | None:
        """The hang that was told last, if neither its end was told nor another attempt begun since."""
        ends = [one for one in self.events if one.name in _NO_HANG_SINCE]
        after = max((one.at_unix_s for one in ends), default=0.0)
        return next((one for one in self.hangs[-1:] if one.at_unix_s >= after), None)

    @property
    def verdict(self) -> evidence.FailedAttempt | None:
        """The failure that the run ended with; None if nothing was written down of it.

        One of an earlier launch in the same folder is another story.
        """
        last, state = self.failures[-1] if self.failures else None, self.state
        if last is None or state is None or last.at_unix_s < state.started_unix_s:
            return None
        what = last.finding.what.partition("\n")[0]
        return last if what in state.headline or not state.headline else None

    @property
    def untold_restarts(self) -> list[run_state.RunEvent]:
        """Restarts after a failure that nothing else was written down of: such as of the launcher itself."""
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
        """Return what happened, in the order of time."""
        return sorted(self._moments(), key=lambda one: one.at_unix_s)

    def _moments(self) -> Iterator[TimelineEvent]:
        state = self.state
        if state is not None:
            words = printable(self.job.shown) if self.job else "not known what"
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
        with contextlib.suppress(Exception):  # damaged ones are another command's subject
            from torchmuster.checkpoints.local import FolderStore
            from torchmuster.checkpoints.manifest import committed_manifests

            kept = committed_manifests(FolderStore(self.run.checkpoints))
            for newest in kept[:1]:
                older = f"; {len(kept) - 1} older are kept" if len(kept) > 1 else ""
                words = f"saved step {newest.step}: checkpoints/{newest.name}{older}"
                yield TimelineEvent(at_unix_s=newest.made_unix_s, what=words)


def timeline_text(moments: Sequence[TimelineEvent]) -> list[str]:
    """Return the story as a few lines, each with its time; of a long one the middle is left out."""
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
    """Say what happened, a restart too; "" for what only leads to something else."""
    return _restart_words(event) if event.name == run_state.RESTART else _event_words(event)


def _event_words(event: run_state.RunEvent) -> str:
    """Say what happened; "" for what only leads to something else."""
    facts = event.facts
    match event.name:
        case "submitted" | "joining" | "starting" | "running":
            return ""
        case "started":
            count, attempt = facts.get("ranks"), facts.get("attempt")
            hosts = facts.get("hosts")
            where = f": {', '.join(map(str, hosts))}" if isinstance(hosts, list) else ""
            again = f" (attempt {attempt + 1})" if isinstance(attempt, int) and attempt else ""
            return f"{count} rank{'' if count == 1 else 's'} started{where}{again}"
        case "finished" | "failed" | "stopped" | "saved":
            return f"{event.name}: {_failure_report_line(str(facts.get('headline', '')))}"
    return _failure_report_line(str(facts.get("what", "")))


def _restart_words(event: run_state.RunEvent) -> str:
    headline, step = (
        _failure_report_line(str(event.facts.get("headline", ""))),
        event.facts.get("from_step"),
    )
    where = f" from step {step:,}" if isinstance(step, int) else ""
    return f"{headline or 'it failed'}; started again{where}"


def _failure_report_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


_LOGS_NAMED = 8
_LOGS_READ = 16
_LOG_BYTES = 64 * 1024
# Where the run's folder was when it was written does not matter to whoever has it now.
_PATH_INSIDE = re.compile(r"(?<![\w/])/\S*/((?:logs/rank-|hang/\d+|checkpoints/)\S*)")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What is to be said of a run, the first cause first; ``files`` are names within its folder."""

    story: Timeline
    findings: tuple[Finding, ...]
    files: tuple[str, ...]


def failure_report_of(run: RunFolder) -> FailureReport:
    """Read a run's folder and say what it means."""
    story = Timeline.of(run)
    return FailureReport(
        story=story,
        findings=tuple(_with_names_inside(one) for one in _failure_report_findings(story)),
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
        case "failed":
            yield _failed(story, state)
        case "saved":
            words = state.headline or "saved at a request to end"
            yield Finding(name="run-saved", status=Status.OK, what=words, fix=_how_to_go_on(story))
        case "stopped":
            yield Finding(name="run-stopped", status=Status.NOTE, what=state.headline)
            yield from _last_troubles(story)
        case "died":
            yield _died(story, state)
            yield from _last_troubles(story)
        case _:
            yield _active(story, state)
            if story.hang_now is not None:
                yield _of_hang(story.hang_now)


def _finished(story: Timeline, state: run_state.RunState) -> Finding:
    took = format_seconds(max(0.0, state.since_unix_s - state.started_unix_s))
    return Finding(
        name="run-finished",
        status=Status.OK,
        what=f"{state.headline or 'finished well'} in {took}{_after_failures(story)}",
    )


def _failed(story: Timeline, state: run_state.RunState) -> Finding:
    """Return the last attempt's verdict, with what else the folder knows of it."""
    if story.verdict is None:
        finding = Finding(name="run-failed", status=Status.FAILURE, what=state.headline)
        if not story.failures:
            return _explained(finding, _known_in(_logs(story.run)))
        before = f"before that: {story.failures[-1].finding.what}"
        return dataclasses.replace(finding, why=before, fix="see console.log in its folder")
    finding = story.verdict.finding
    why = [finding.why]
    if earlier := story.failures[:-1]:
        why.append(
            f"{plural(len(earlier), 'attempt')} had failed before: {earlier[-1].finding.what}"
        )
    hang = story.hang_now
    if hang is not None and finding.name not in messages.NAMES:
        why.append(f"shortly before it was told: {hang.finding.what}")
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
    left = f"muster stop {story.run.path}   # ends what may be left of it"
    return Finding(
        name="launcher-killed",
        status=Status.FAILURE,
        what=f"{state.headline}{f' on {job.launcher.host}' if job else ''}, and its ranks ended with it",
        why=f"{was}it left no word, so it was ended from outside: kill -9, want of memory, or the machine was "
        "restarted",
        fix=_joined(["journalctl and dmesg there tell who did it", left, _how_to_go_on(story)]),
    )


def _not_heard_of(story: Timeline, state: run_state.RunState, host: str, was: str) -> Finding:
    there = f"on {host}, should it be there: muster stop {story.run.path}"
    return Finding(
        name="launcher-gone",
        status=Status.FAILURE,
        what=state.headline.replace("the launcher", f"the launcher on {host}"),
        why=f"{was}that machine is gone, or cut off from this disk; if this folder is a copy, it was made then",
        fix=_joined([there, _how_to_go_on(story)]),
    )


def _active(story: Timeline, state: run_state.RunState) -> Finding:
    job = story.job
    if job is not None and job.launcher.is_of_this_machine:
        since = format_seconds(max(0.0, time.time() - state.started_unix_s))
        what = f"{state.phase}; launched {since} ago{_after_failures(story)}"
        return Finding(name="run-active", status=Status.OK, what=what)
    host = job.launcher.host if job else "another machine"
    return Finding(
        name="run-active",
        status=Status.NOTE,
        what=f"{state.phase} when it was last heard of{_after_failures(story)}",
        why=f"it was launched on {host}: whether it still runs cannot be seen from here. The newest file in its folder "
        f"is {_age_of_newest(story.run)} old",
        fix=f"on {host}: muster explain {story.run.id}",
    )


def _failure_report_unknown() -> Finding:
    return Finding(
        name="run-unknown",
        status=Status.NOTE,
        what="its folder does not say how it went",
        why="state.json is missing or cannot be read: the run never began, or its folder was copied in part",
        fix="see console.log and logs/ in its folder",
    )


def _last_troubles(story: Timeline) -> Iterator[Finding]:
    """Return what was wrong when the run ended without a verdict."""
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
    """Return a hang as it was told, with what the flight recorders say of it."""
    said = [one.what for one in hang.analysis]
    return dataclasses.replace(hang.finding, evidence=_joined([hang.finding.evidence, *said]))


def _how_to_go_on(story: Timeline) -> str:
    ours = story.job is not None and story.job.typed[:1] == ["train"]
    resume = f"muster train --resume {story.run.path}   # goes on from its newest good checkpoint"
    return resume if ours else ""


def _after_failures(story: Timeline) -> str:
    failed = len(story.failures) + len(story.untold_restarts)
    return f", after {plural(failed, 'failed attempt')}" if failed else ""


# ---- logs


def _failure_report_files(story: Timeline) -> Iterator[str]:
    """Return the names of what there is to read, the most telling first."""
    run = story.run
    guilty = [one.rank for failed in story.failures[-1:] for one in failed.ranks]
    logs = [run.rank_log(rank) for rank in guilty] or sorted(run.logs.glob("rank-*.log"))
    kept = [path for hang in story.hangs[-1:] for path in hang.files]
    for path in dict.fromkeys([*kept, *logs[:_LOGS_NAMED], run.console]):
        if path.exists():
            yield path.relative_to(run.path).as_posix()


def _explained(finding: Finding, known: Sequence[Finding]) -> Finding:
    """Add what is known of the texts in the logs to a finding that has no explanation."""
    if not known:
        return finding
    first = known[0]
    return dataclasses.replace(finding, why=first.what, fix=first.fix, evidence=first.evidence)


def _logs(run: RunFolder) -> list[Path]:
    """Return the logs that are there, those written last first; the launcher's own is the last."""
    found = [*run.logs.glob("rank-*.log")]
    with contextlib.suppress(OSError):
        found.sort(key=lambda path: -path.stat().st_mtime)
    return [*found[:_LOGS_READ], run.console]


def _known_in(logs: Sequence[Path]) -> list[Finding]:
    """Return what is known of the error texts in logs, causes before what follows from them."""
    found: dict[str, Explanation] = {}
    for path in logs:
        for one in explain_text(_end_of(path)):
            if one.role is not Role.ASIDE:
                found.setdefault(one.name, one)
    return [explanation_finding(one) for one in sorted(found.values(), key=lambda one: one.role)]


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _LOG_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _age_of_newest(run: RunFolder) -> str:
    newest = 0.0
    for path in (run.state, run.console, *run.logs.glob("rank-*.log")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return format_seconds(max(0.0, time.time() - newest))


def _with_names_inside(finding: Finding) -> Finding:
    """Name files as they are called within the run's folder, wherever that is now."""
    return dataclasses.replace(
        finding,
        why=_PATH_INSIDE.sub(r"\1", finding.why),
        evidence=_PATH_INSIDE.sub(r"\1", finding.evidence),
    )


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part)
