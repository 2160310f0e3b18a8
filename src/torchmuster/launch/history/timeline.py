"""The story of a run as its folder tells it: everything that was written down, and when it happened."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.launch.history import evidence, run_state
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

_NO_HANG_SINCE = ("hang-over", "submitted", "roll-call", "starting")
_LINES_SHOWN = 14
_FIRST_LINES = 5
_LONGEST_LINE = 200


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A line of the story."""

    at_unix_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything that was written down of a run; what is missing or torn is left out."""

    run: RunFolder
    job: run_state.Job | None
    state: run_state.State | None
    events: tuple[run_state.Event, ...]
    failures: tuple[evidence.FailedAttempt, ...]
    hangs: tuple[evidence.Hang, ...]

    @classmethod
    def of(cls, run: RunFolder) -> "Story":
        """Read a run's folder."""
        return cls(
            run=run,
            job=run_state.read_job(run),
            state=run_state.read_state(run),
            events=tuple(run_state.events(run)),
            failures=tuple(evidence.failures(run)),
            hangs=tuple(evidence.hangs(run)),
        )

    @property
    def hang_now(self) -> evidence.Hang | None:
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
    def untold_restarts(self) -> list[run_state.Event]:
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

    def moments(self) -> list[Moment]:
        """Return what happened, in the order of time."""
        return sorted(self._moments(), key=lambda one: one.at_unix_s)

    def _moments(self) -> Iterator[Moment]:
        state = self.state
        if state is not None:
            words = printable(self.job.shown) if self.job else "not known what"
            yield Moment(at_unix_s=state.started_unix_s, what=f"launched: {words}")
        for event in self.events:
            if words := _event_words(event):
                yield Moment(at_unix_s=event.at_unix_s, what=words)
        for event in self.untold_restarts:
            yield Moment(at_unix_s=event.at_unix_s, what=_restart_words(event))
        for failed in self.failures:
            words = f"attempt {failed.attempt + 1} failed: {_line(failed.finding.what)}"
            yield Moment(at_unix_s=failed.at_unix_s, what=words)
        yield from self._saves()
        told = bool(self.events) and state is not None and self.events[-1].name == state.phase
        if state is not None and not state.active and not told:
            words = f"{state.phase}: {_line(state.headline)}"
            yield Moment(at_unix_s=state.since_unix_s, what=words)

    def _saves(self) -> Iterator[Moment]:
        with contextlib.suppress(Exception):  # damaged ones are another command's subject
            from torchmuster.checkpoints.local import FolderStore
            from torchmuster.checkpoints.manifest import committed

            kept = committed(FolderStore(self.run.checkpoints))
            for newest in kept[:1]:
                older = f"; {len(kept) - 1} older are kept" if len(kept) > 1 else ""
                words = f"saved step {newest.step}: checkpoints/{newest.name}{older}"
                yield Moment(at_unix_s=newest.made_unix_s, what=words)


def shown(moments: Sequence[Moment]) -> list[str]:
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


def words_of(event: run_state.Event) -> str:
    """Say what happened, a restart too; "" for what only leads to something else."""
    return _restart_words(event) if event.name == run_state.RESTART else _event_words(event)


def _event_words(event: run_state.Event) -> str:
    """Say what happened; "" for what only leads to something else."""
    facts = event.facts
    match event.name:
        case "submitted" | "roll-call" | "starting" | "running":
            return ""
        case "started":
            count, attempt = facts.get("ranks"), facts.get("attempt")
            hosts = facts.get("hosts")
            where = f": {', '.join(map(str, hosts))}" if isinstance(hosts, list) else ""
            again = f" (attempt {attempt + 1})" if isinstance(attempt, int) and attempt else ""
            return f"{count} rank{'' if count == 1 else 's'} started{where}{again}"
        case "finished" | "failed" | "stopped" | "saved":
            return f"{event.name}: {_line(str(facts.get('headline', '')))}"
    return _line(str(facts.get("what", "")))


def _restart_words(event: run_state.Event) -> str:
    headline, step = _line(str(event.facts.get("headline", ""))), event.facts.get("from_step")
    where = f" from step {step:,}" if isinstance(step, int) else ""
    return f"{headline or 'it failed'}; started again{where}"


def _line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
