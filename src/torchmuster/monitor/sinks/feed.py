"""The rows of a run's folder as they are written, in the order of their steps."""

from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.sinks.row import Row, row_of
from torchmuster.runfolder import RunFolder


class Feed:
    """Gives the rows that came since the last look; all of them again where a file was written anew."""

    def __init__(self, run: RunFolder) -> None:
        self._steps = GrowingFile(run.metrics / "steps.jsonl")
        self._evaluations = GrowingFile(run.metrics / "evaluations.jsonl")
        self._early: list[Row] = []  # evaluations whose steps were not seen yet
        self._reached = 0

    def new_rows(self, *, last: bool = False) -> list[Row]:
        """Return new rows; ``last`` says that nothing is written any more, so the last look gives nothing.

        Steps are read first, so whatever was evaluated before one of them is seen. An evaluation after them waits
        for the next: some trackers do not take a step after a later one.
        """
        anew, lines = self._steps.new_lines()
        rows = [row for line in lines if (row := row_of("train", line)) is not None]
        evaluated_anew, lines = self._evaluations.new_lines()
        if evaluated_anew:
            self._early.clear()
        self._early += [row for line in lines if (row := row_of("evaluation", line)) is not None]
        if anew:
            self._reached = 0
        self._reached = max([self._reached, *(row.step for row in rows)])
        all_seen = last and not rows
        ready = [row for row in self._early if all_seen or row.step <= self._reached]
        self._early = [row for row in self._early if not all_seen and row.step > self._reached]
        # Stable: an evaluation comes after the line about its step.
        return sorted([*rows, *ready], key=lambda row: row.step)
