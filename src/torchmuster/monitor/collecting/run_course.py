"""What happened to a run: how often its ranks were started again, and for how long it has been at work."""

from torchmuster.launch.history import run_state
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.runfolder import RunFolder


class RunCourse:
    """Follows the events of one run.

    A run that had ended and goes on in its folder (``--resume``) begins anew as far as its state tells. Its steps
    do not, so neither may the time that they are held against; the time in between is nobody's.
    """

    def __init__(self, run: RunFolder) -> None:
        self._events = GrowingFile(run.path / run_state.EVENTS)
        self._forget()

    def _forget(self) -> None:
        self.restarts = 0
        self.ranks_started = 0  # the most at a time, since it was launched
        self._begun: float | None = None
        self._ended: list[tuple[float, float]] = []  # when it was started and ended before

    def catch_up(self) -> None:
        """Take in what has happened since the last look."""
        anew, events = self._events.new_lines()
        if anew:
            self._forget()
        for event in events:
            self.restarts += event.get("event") == run_state.RESTART
            ranks = event.get("ranks")
            if event.get("event") == "started" and isinstance(ranks, int):
                self.ranks_started = max(self.ranks_started, ranks)
            elif "exit_code" in event:
                self.ranks_started = 0
            at_unix_s = event.get("at_unix_s")
            if not isinstance(at_unix_s, int | float):
                continue
            self._begun = at_unix_s if self._begun is None else self._begun
            if "exit_code" in event:
                self._ended.append((self._begun, at_unix_s))
                self._begun = None

    def lasts_s(self, state: run_state.State, until_unix_s: float) -> float:
        """Return for how long it has been at work until a moment, all times together."""
        before_s = sum(end - begun for begun, end in self._ended if end <= state.started_unix_s)
        return before_s + until_unix_s - state.started_unix_s
