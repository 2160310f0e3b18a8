"""Everything recorded of a run, read from its folder, and its timeline."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint, read_script_checkpoints
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, plural

_SAME_LAUNCH_S = 5.0  # a launch writes its first event and its state this close together
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
    def hang(self) -> evidence.HangRecord | None:
        """The hang that is not over, or was not when the run ended."""
        event = run_state.EventSummary.of(self.events).hang
        if event is None:
            return None
        if self.hangs and self.hangs[-1].at_unix_s >= event.at_unix_s:
            return self.hangs[-1]
        what = str(event.facts.get("what", ""))  # nothing else was recorded of it (yet)
        finding = Finding(name=run_state.HANG, status=Status.WARNING, what=what)
        return evidence.HangRecord(at_unix_s=event.at_unix_s, finding=finding, analysis=())

    @property
    def last_failure(self) -> evidence.FailedAttempt | None:
        """The failure that ended the run; None if none was recorded.

        A failure of an earlier launch in the same folder does not count.
        """
        state = self.state
        if not self.failures or state is None:
            return None
        last = self.failures[-1]
        if last.at_unix_s < state.started_unix_s:
            return None
        what = last.finding.what.partition("\n")[0]
        return last if not state.headline or what in state.headline else None

    def timeline(self) -> list[TimelineEvent]:
        """Return what happened, in chronological order."""
        moments = [*self._launched(), *self._events(), *self._saves()]
        return sorted(moments, key=lambda moment: moment.at_unix_s)

    def _launched(self) -> Iterator[TimelineEvent]:
        if self.state is not None:
            command = printable(self.job.shown) if self.job else "unknown command"
            yield TimelineEvent(at_unix_s=self.state.started_unix_s, what=f"launched: {command}")

    def _events(self) -> Iterator[TimelineEvent]:
        """Yield the events, and the end if it was not logged."""
        for event in self.events:
            text = event_text(event)
            if text is not None:
                yield TimelineEvent(at_unix_s=event.at_unix_s, what=text)
        state = self.state
        if state is None or state.active:
            return
        if not self.events or self.events[-1].name != state.phase:
            what = f"{state.phase}: {_first_line(state.headline)}"
            yield TimelineEvent(at_unix_s=state.since_unix_s, what=what)

    def _saves(self) -> Iterator[TimelineEvent]:
        """Yield the newest checkpoint of ``muster train``, and the newest one of the user's script."""
        with contextlib.suppress(Exception):  # another command reports damaged ones
            from torchmuster.checkpoints.manifest import committed_manifests
            from torchmuster.checkpoints.store import FolderStore

            manifests = committed_manifests(FolderStore(self.run.checkpoints))
            if manifests:
                newest = manifests[0]
                what = f"saved step {newest.step}: checkpoints/{newest.name}"
                what += _and_earlier(len(manifests) - 1)
                yield TimelineEvent(at_unix_s=newest.made_unix_s, what=what)
        if self.checkpoints:
            saved = self.checkpoints[0]
            what = f"saved step {saved.step:,}: {saved.path} ({saved.condition})"
            what += _and_earlier(len(self.checkpoints) - 1)
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


def event_text(event: run_state.RunEvent) -> str | None:
    """Return the text of an event; None for intermediate phases."""
    facts = event.facts
    if event.name in run_state.ACTIVE:
        return None
    if event.name == "started":
        return _start_text(facts)
    headline = _first_line(str(facts.get("headline", "")))
    if event.name in _ENDS:
        return headline if headline.startswith(event.name) else f"{event.name}: {headline}"
    if event.name == run_state.RESTART:
        text = f"{headline or 'it failed'}; restarted"
        step = facts.get("from_step")
        return f"{text} from step {step:,}" if isinstance(step, int) else text
    return _first_line(str(facts.get("what", ""))) or None


def _start_text(facts: dict[str, object]) -> str:
    count = facts.get("ranks")
    text = "1 rank started" if count == 1 else f"{count} ranks started"
    for name, prefix in (("hosts", ": "), ("spares", "; spares: ")):
        hosts = facts.get(name)
        if isinstance(hosts, list):
            text += prefix + (", ".join(map(str, hosts)) or "none")
    attempt = facts.get("attempt")
    if isinstance(attempt, int) and attempt:
        text += f" (attempt {attempt + 1})"
    return text


def _and_earlier(count: int) -> str:
    return f"; {plural(count, 'earlier checkpoint')}" if count else ""


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
