"""Everything recorded of a run, read from its folder, and its timeline."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint, read_script_checkpoints
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

_LINES_SHOWN = 14
_FIRST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything recorded of a run; missing or truncated parts are left out."""

    run: RunFolder
    job: run_state.RunJob | None
    state: run_state.RunState | None
    events: tuple[run_state.RunEvent, ...]
    checkpoints: tuple[ScriptCheckpoint, ...] = ()  # of the user's script, newest first

    @classmethod
    def of(cls, run: RunFolder) -> "RunRecord":
        """Read a run's folder."""
        job = run_state.read_job(run)
        return cls(
            run=run,
            job=job,
            state=run_state.state_of(run, job),
            events=tuple(run_state.read_events(run)),
            checkpoints=tuple(read_script_checkpoints(run.metrics)),
        )

    @property
    def hang(self) -> evidence.HangRecord | None:
        """The hang that is not over, or was not when the run ended."""
        if self.state is None or self.state.hang is None:
            return None
        return evidence.hang_of(self.run, self.state.hang)

    def timeline(self) -> list[tuple[float, str]]:
        """Return what happened in chronological order, each with its Unix time in seconds."""
        moments = [(event.at_unix_s, event.text) for event in self.events if event.text]
        state = self.state
        if state is not None and state.phase == run_state.DIED:  # not logged before the next launch
            moments.append((state.since_unix_s, f"died: {state.headline}"))
        return moments


def timeline_text(moments: Sequence[tuple[float, str]]) -> list[str]:
    """Return the timeline as text lines with times; the middle of a long one is left out."""
    lines = []
    for at_unix_s, what in moments:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_unix_s))
        after = f"+{format_seconds(max(0.0, at_unix_s - moments[0][0]))}"
        lines.append(f"{when}  {after:>9}  {what}")
    if len(lines) > _LINES_SHOWN:
        last = _LINES_SHOWN - _FIRST_LINES - 1
        left_out = f"… {len(lines) - _FIRST_LINES - last} more …"
        lines = [*lines[:_FIRST_LINES], left_out, *lines[-last:]]
    return lines
