"""Checkpoint policy: when to save during training, how saves are reported, and the final save."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.checkpoints.base_model import BaseModel
from torchmuster.checkpoints.store import Store, open_store
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status, render
from torchmuster.runfolder import is_no_room
from torchmuster.train.checkpointing.checkpointer import Checkpointer, SaveReport
from torchmuster.train.stop_request import StoppedAtRequest, StopRequest

State = dict[str, Any]
RETRY_EVERY_S = 30.0  # of a final write for which there was no room
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where to save the training state, and how often: every N steps or seconds, and at the end.

    ``to`` is a folder, a URL such as ``s3://bucket/path``, or a store. ``keep`` is the number of newest
    checkpoints to keep; ``keep_best`` also saves after each evaluation with the best metric so far,
    and keeps that checkpoint (``Evaluation(best_metric=…)``). Rank 0 measures the seconds
    and sends them to the other ranks with every step line, so saves follow a step line. With
    ``stop``, a signal to any rank makes all of them save after the same step and exit. With
    ``base``, frozen parameters are not saved: they are those of its files, and a resumed run loads
    them from there again. With ``retry_final``, a final save that fails is repeated until it succeeds or
    a stop is requested, as ``muster train`` does: finished work is not thrown away.
    """

    to: "Store | Path | str"
    every: int | None = None
    every_s: float | None = None
    keep: int = 3
    keep_best: bool = False
    stop: StopRequest | None = None
    retry_final: bool = False
    base: BaseModel | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("every_s", self.every_s)):
            if value is not None and value <= 0:
                raise Impossible(
                    f"{name} is {value:g}, but must be above 0",
                    fix=f"give a number above 0, or leave out {name}",
                )

    def store(self) -> Store:
        """Return the store; nothing is created there yet."""
        return open_store(self.to) if isinstance(self.to, str | Path) else self.to


class CheckpointPolicy:
    """The saves of one call of ``Trainer.fit``; all ranks call the same methods."""

    def __init__(
        self,
        saving: CheckpointSettings,
        checkpointer: Checkpointer,
        *,
        take: Callable[[], tuple[State, State]],
    ) -> None:
        """``take`` returns the training state and this rank's own part."""
        self._saving = saving
        self._checkpointer = checkpointer
        self._take = take
        self._saved_step: int | None = None
        self._saved_at_s = 0.0
        self.is_last = False  # the current save is the last one

    def check_room(self, state: State) -> str:
        """Return findings about the space that saves need; raise if there is too little."""
        findings = self._checkpointer.check_room(state)
        for finding in findings:
            if finding.status is Status.FAILURE:
                raise Impossible(finding.what, why=finding.why, fix=finding.fix)
        return render(findings)

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Return whether to save after a step; ``elapsed_s`` is the same on all ranks."""
        self._checkpointer.poll()
        every, every_s = self._saving.every, self._saving.every_s
        if every is not None and step % every == 0:
            return True
        return every_s is not None and elapsed_s - self._saved_at_s >= every_s

    def save(self, step: int, elapsed_s: float, *, best: Mapping[str, float] | None = None) -> None:
        """Copy the state; it is written in the background.

        ``best`` is the metric and its value if this checkpoint is the best one so far.
        """
        state, own = self._take()
        self._checkpointer.save(state, step, own=own, best=best)
        self._saved_step = step
        self._saved_at_s = elapsed_s

    def end_if_requested(self, step: int, elapsed_s: float) -> None:
        """After each step: save and raise :class:`StoppedAtRequest` if a stop was requested."""
        stop = self._saving.stop
        if stop is None or not stop.due(step):
            return
        report = self._save_and_wait(step, elapsed_s)
        if report is not None and report.problem is not None:
            raise MusterError(
                f"stop requested ({stop.origin}), but step {step} could not be saved",
                why=report.problem,
                fix="earlier checkpoints are unchanged: rerun to resume from the newest",
            )
        raise StoppedAtRequest(step, stop.origin)

    def end(self, step: int) -> None:
        """Save the final state, and wait until everything is written."""
        report = self._save_and_wait(step, 0.0)
        while self._saving.retry_final and _has_no_room(report):
            if self._is_stopped_within(RETRY_EVERY_S):
                raise MusterError(
                    f"stopped before the final state, step {step}, could be saved",
                    why="there is still no space for it",
                    fix="free disk space there, and rerun: it resumes from the newest checkpoint",
                )
            report = self._save_and_wait(step, 0.0)

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait; return early if a rank must stop. An early warning of a scheduler leaves time for another try."""
        stop = self._saving.stop
        until_s = time.monotonic() + seconds
        is_over = False
        while not is_over:
            time.sleep(_LOOK_EVERY_S)
            if self._checkpointer.on_any_rank(stop is not None and stop.demanded):
                return True
            is_over = self._checkpointer.on_any_rank(time.monotonic() >= until_s)
        return False

    def _save_and_wait(self, step: int, elapsed_s: float) -> SaveReport | None:
        report = self._checkpointer.wait()
        if self._saved_step != step or (report is not None and report.problem is not None):
            self.is_last = True
            self.save(step, elapsed_s)
            report = self._checkpointer.wait()
        return report


def _has_no_room(report: SaveReport | None) -> bool:
    return report is not None and report.problem is not None and is_no_room(report.problem)


def save_message(report: SaveReport, *, is_last: bool = False, retries: bool = False) -> str:
    """Describe a save that failed, with its fix; "" if it succeeded."""
    if report.problem is None:
        return ""
    what = f"step {report.step} could not be saved; training continues"
    fix = (
        "the next save is attempted as usual; until one succeeds, a restart resumes "
        "from the previous checkpoint"
    )
    if is_last:
        what = f"the final state, step {report.step}, could not be saved"
        fix = "fix the cause and rerun: it resumes from the newest checkpoint"
        if retries and _has_no_room(report):
            fix = (
                f"free disk space there: the ranks keep the state in memory and try again every "
                f"{RETRY_EVERY_S:.0f} s"
            )
    finding = Finding(
        name="not-saved", status=Status.WARNING, what=what, why=report.problem, fix=fix
    )
    return render([finding])
