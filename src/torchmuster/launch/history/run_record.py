"""Everything recorded of a run, read from its folder, and its timeline."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint, read_script_checkpoints
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_SAME_LAUNCH_S = 5.0  # a launch writes its first event and its state this close together
_NO_HANG_SINCE = (run_state.HANG_OVER, "submitted", "waiting", "joining", "starting")
_ENDS = ("finished", "failed", "stopped", "saved")
_LINES_SHOWN = 14
_FIRST_LINES = 5
_LONGEST_LINE = 200


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One line of the timeline."""

    at_unix_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything recorded of a run; missing or truncated parts are left out."""

    run: RunFolder
    job: run_state.RunJob | None
    state: run_state.RunState | None
    events: tuple[run_state.RunEvent, ...]
    failures: tuple[evidence.FailedAttempt, ...]
    hangs: tuple[evidence.HangRecord, ...]
    checkpoints: tuple[ScriptCheckpoint, ...] = ()  # of the user's script, newest first

    @classmethod
    def of(cls, run: RunFolder) -> "RunRecord":
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
        if self.state is None or not self.events:
            return False
        return self.events[0].at_unix_s < self.state.started_unix_s - _SAME_LAUNCH_S

    @property
    def hang_now(self) -> evidence.HangRecord | None:
        """The last reported hang, unless it was reported as over or another attempt has started since."""
        ends = [event.at_unix_s for event in self.events if event.name in _NO_HANG_SINCE]
        if not self.hangs or self.hangs[-1].at_unix_s < max(ends, default=0.0):
            return None
        return self.hangs[-1]

    @property
    def last_failure(self) -> evidence.FailedAttempt | None:
        """The failure that ended the run; None if none was recorded.

        A failure of an earlier launch in the same folder does not count.
        """
        last, state = self.failures[-1] if self.failures else None, self.state
        if last is None or state is None or last.at_unix_s < state.started_unix_s:
            return None
        what = last.finding.what.partition("\n")[0]
        return last if what in state.headline or not state.headline else None

    @property
    def unexplained_restarts(self) -> list[run_state.RunEvent]:
        """Restarts after a failure with no other record, such as a failure of the launcher itself."""
        restarts, since = [], 0.0
        for event in self.events:
            if event.name != run_state.RESTART:
                continue
            headline = event.facts.get("headline")
            recorded = [
                failed
                for failed in self.failures
                if since < failed.at_unix_s <= event.at_unix_s and failed.finding.what == headline
            ]
            if not recorded:
                restarts.append(event)
            since = event.at_unix_s
        return restarts

    def timeline(self) -> list[TimelineEvent]:
        """Return what happened, in chronological order."""
        return sorted(self._moments(), key=lambda moment: moment.at_unix_s)

    def _moments(self) -> Iterator[TimelineEvent]:
        state = self.state
        if state is not None:
            command = printable(self.job.shown) if self.job else "unknown command"
            yield TimelineEvent(at_unix_s=state.started_unix_s, what=f"launched: {command}")
        restarts = self.unexplained_restarts
        for event in self.events:
            text = event_text(event) if event.name != run_state.RESTART or event in restarts else ""
            if text and not self._is_failure_again(event):
                yield TimelineEvent(at_unix_s=event.at_unix_s, what=text)
        for failed in self.failures:
            what = f"attempt {failed.attempt + 1} failed: {_first_line(failed.finding.what)}"
            yield TimelineEvent(at_unix_s=failed.at_unix_s, what=what)
        yield from self._saves()
        is_logged = bool(self.events) and state is not None and self.events[-1].name == state.phase
        if state is not None and not state.active and not is_logged:
            what = f"{state.phase}: {_first_line(state.headline)}"
            yield TimelineEvent(at_unix_s=state.since_unix_s, what=what)

    def _is_failure_again(self, event: run_state.RunEvent) -> bool:
        """Return whether the end of the run only repeats the failure of its last attempt."""
        if event.name != "failed" or not self.failures:
            return False
        return event.facts.get("headline") == self.failures[-1].finding.what

    def _saves(self) -> Iterator[TimelineEvent]:
        with contextlib.suppress(Exception):  # another command reports damaged ones
            from torchmuster.checkpoints.manifest import committed_manifests
            from torchmuster.checkpoints.store import FolderStore

            manifests = committed_manifests(FolderStore(self.run.checkpoints))
            if manifests:
                newest, count = manifests[0], len(manifests) - 1
                what = f"saved step {newest.step}: checkpoints/{newest.name}"
                what += f"; {plural(count, 'older checkpoint')} kept" if count else ""
                yield TimelineEvent(at_unix_s=newest.made_unix_s, what=what)
        if self.checkpoints:
            saved, count = self.checkpoints[0], len(self.checkpoints) - 1
            what = f"saved step {saved.step:,}: {saved.path} ({saved.condition})"
            what += f"; {plural(count, 'earlier checkpoint')}" if count else ""
            yield TimelineEvent(at_unix_s=saved.at_unix_s, what=what)


def timeline_text(moments: Sequence[TimelineEvent]) -> list[str]:
    """Return the timeline as text lines with times; the middle of a long one is left out."""
    lines = []
    for moment in moments:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.at_unix_s))
        after = f"+{format_seconds(max(0.0, moment.at_unix_s - moments[0].at_unix_s))}"
        lines.append(f"{when}  {after:>9}  {moment.what}")
    if len(lines) > _LINES_SHOWN:
        last = _LINES_SHOWN - _FIRST_LINES - 1
        left_out = f"… {len(lines) - _FIRST_LINES - last} more …"
        lines = [*lines[:_FIRST_LINES], left_out, *lines[-last:]]
    return lines


def event_text(event: run_state.RunEvent) -> str:
    """Return the text of an event; "" for intermediate phases."""
    facts = event.facts
    if event.name in run_state.ACTIVE:
        return ""
    if event.name == "started":
        return _start_text(facts)
    headline = _first_line(str(facts.get("headline", "")))
    if event.name in _ENDS:
        return headline if headline.startswith(event.name) else f"{event.name}: {headline}"
    if event.name == run_state.RESTART:
        step = facts.get("from_step")
        where = f" from step {step:,}" if isinstance(step, int) else ""
        return f"{headline or 'it failed'}; restarted{where}"
    return _first_line(str(facts.get("what", "")))


def _start_text(facts: dict[str, object]) -> str:
    count, attempt = facts.get("ranks"), facts.get("attempt")
    text = f"{count} rank{'' if count == 1 else 's'} started"
    hosts, spares = facts.get("hosts"), facts.get("spares")
    if isinstance(hosts, list):
        text += f": {', '.join(map(str, hosts))}"
    if isinstance(spares, list):
        text += f"; spares: {', '.join(map(str, spares)) or 'none'}"
    return f"{text} (attempt {attempt + 1})" if isinstance(attempt, int) and attempt else text


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
