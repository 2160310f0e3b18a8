"""Everything a run tells: on rank 0 lines, a bar, files and whoever listens; on the others nothing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchmuster.train.metrics.metrics_file import MetricsFile
from torchmuster.train.metrics.progress import Lines, Screen, Silence, screen
from torchmuster.train.metrics.step_line import StepRecord, render
from torchmuster.train.world import World

_SILENT_AT_MOST_S = 10.0


class Reports:
    """Says when the next line is due, and takes lines to where they are read."""

    def __init__(
        self,
        world: World,
        *,
        folder: Path | None = None,
        log_every: int = 50,
        quiet: bool = False,
        on_record: Sequence[Callable[[StepRecord], None]] = (),
        also_at: int | None = None,
    ) -> None:
        """Report every ``log_every`` steps, and at least every 10 seconds.

        ``folder`` gets ``metrics/steps.jsonl``; ``on_record`` functions are called on rank 0 with each record.
        ``also_at`` is a step after which a line is made in any case.
        """
        self._speaks = world.is_first and not quiet
        self._log_every = log_every
        self._also_at = also_at
        self._files = MetricsFile(folder) if folder is not None and world.is_first else None
        self._listeners = tuple(on_record) if world.is_first else ()
        self._last_step: int | None = None
        self.screen: Screen = self._plain()

    def _plain(self) -> Screen:
        """Return where texts go before and after the run."""
        return Lines() if self._speaks else Silence()

    def open(self, last_step: int | None) -> None:
        """Begin; ``last_step`` is where the run will end, if that is known."""
        self._last_step = last_step
        if self._speaks:
            self.screen = screen(last_step)

    def go_on_from(self, step: int, *, evaluated: int) -> None:
        """Forget the lines after that of a step, and later evaluations: they are made again."""
        if self._files is not None:
            self._files.cut_off_after(step, evaluated=evaluated)

    def say(self, text: str) -> None:
        """Show a text, on rank 0."""
        if self._speaks:
            for line in text.splitlines():
                self.screen.say(line)

    def record(self, record: StepRecord) -> None:
        """Show and write a record."""
        if self._speaks:
            self.screen.say(render(record, last_step=self._last_step))
        if self._files is not None and (trouble := self._files.write_step(record)):
            self.say(trouble)
        for listener in self._listeners:
            listener(record)

    def evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Show and write what an evaluation gave."""
        if self._speaks:
            said = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
            self.screen.say(f"evaluation after step {step}: {said}")
        if self._files is not None and (
            trouble := self._files.write_evaluation(step, epoch, numbers)
        ):
            self.say(trouble)

    def begin_saves(self) -> None:
        """Write down that this training saves its state."""
        if self._files is not None:
            self._files.begin_saves()

    def saved(self, text: str, save: Mapping[str, object]) -> None:
        """Show and write what became of a save."""
        self.say(text)
        if self._files is not None and (trouble := self._files.write_save(save)):
            self.say(trouble)

    def next_line(self, step: int, step_s: float) -> int:
        """Return the step of the next line, the same on every rank that is told the same time per step.

        Ranks make a record together, so none may decide by its own clock when to make one.
        """
        in_time = step + max(1, int(_SILENT_AT_MOST_S / step_s)) if step_s > 0 else step + 1
        return min(in_time, self.next_usual_line(step))

    def next_usual_line(self, step: int) -> int:
        """Return the step of the next line where steps are quick."""
        usual = step - step % self._log_every + self._log_every
        if self._also_at is not None and step < self._also_at:
            return min(usual, self._also_at)
        return usual

    def close(self) -> None:
        """Take the bar away and close the files; another :meth:`open` may follow."""
        self.screen.close()
        self.screen = self._plain()
        if self._files is not None:
            self._files.close()
