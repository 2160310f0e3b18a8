"""The runs of a folder that are going on, or ended a short while ago."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchmuster.launch import ledger
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

    def now(self, now_unix_s: float) -> Iterator[FollowedRun]:
        """Yield them, the newest first."""
        newest = list_runs(self._runs)[:_MOST_RUNS]
        for run in newest:
            state = ledger.read_state(run)
            over_s = now_unix_s - state.since_unix_s if state and not state.active else 0.0
            if state is not None and over_s < _TOLD_AFTER_S:
                if run.id not in self._followed:
                    self._followed[run.id] = follow(run)
                yield self._followed[run.id]
        known = {run.id for run in newest}
        for gone in [one for one in self._followed if one not in known]:
            del self._followed[gone]
