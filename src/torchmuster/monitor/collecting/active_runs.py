"""The runs of a folder that are going on, or ended a short while ago."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchmuster.launch.history import run_state
from torchmuster.monitor.collecting.run_metrics import RunMetrics
from torchmuster.runfolder import RunFolder, list_runs, name_of

# A run that has ended is still told of for so long, so that everybody hears how.
_TOLD_AFTER_S = 900.0
_MOST_RUNS = 20


@dataclass(frozen=True)
class FollowedRun:
    """A run, what it is called, and what follows its folder from one look to the next."""

    folder: RunFolder
    job: str
    metrics: RunMetrics


def follow(run: RunFolder) -> FollowedRun:
    """Begin to follow a run."""
    job = name_of(run)
    return FollowedRun(run, job, RunMetrics(run, job))


class ActiveRuns:
    """Looks at a folder of runs, again and again."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[str, FollowedRun] = {}
        self._over: dict[str, int] = {}  # runs, and when it was written that they are

    def now(self, now_unix_s: float) -> Iterator[FollowedRun]:
        """Yield them, the newest first."""
        told: list[str] = []
        for run in list_runs(self._runs):
            if len(told) == _MOST_RUNS:
                break
            if self._is_over(run, now_unix_s):
                continue
            told.append(run.id)
            if run.id not in self._followed:
                self._followed[run.id] = follow(run)
            yield self._followed[run.id]
        for gone in [one for one in self._followed if one not in told]:
            del self._followed[gone]

    def _is_over(self, run: RunFolder, now_unix_s: float) -> bool:
        """Say whether nothing is told of a run any more; of thousands that are over, each is read once."""
        try:
            written = run.state.stat().st_mtime_ns
        except OSError:
            return True  # it was not written yet how it goes
        if self._over.get(run.id) == written:
            return True
        state = run_state.read_state(run)
        if state is None or (not state.active and now_unix_s - state.since_unix_s >= _TOLD_AFTER_S):
            self._over[run.id] = written
            return True
        return False
