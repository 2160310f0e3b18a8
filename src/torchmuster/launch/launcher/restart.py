"""Decide whether a failed run is restarted, and after which pause; this depends on the progress of its training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.decision import Decision
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.launch.launcher.host import ConnectedHost

if TYPE_CHECKING:
    from torchmuster.launch.history.resume import ResumePlan

_LONGEST_PAUSE_S = 30.0
# Errors of code that cannot be parsed or imported, and the exit code of argparse.
_MISTAKES = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "TabError")
_USAGE_EXIT_CODE = 2


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """A failed attempt and the training progress at its end.

    ``got_on``: it wrote a newer checkpoint. ``saved`` is the newest checkpoint's step, None if there is none or it is unknown.
    ``mistake``: another attempt would fail the same way. ``resumes``: another attempt would begin at ``saved``.
    """

    finding: Finding
    mistake: bool = False
    got_on: bool = False
    saved: int | None = None
    resumes: bool = True

    @property
    def from_step(self) -> int | None:
        """The step that another attempt begins at; None if unknown."""
        return self.saved if self.resumes else None


def decide_restart(history: Sequence[PastAttempt], *, max_restarts: int) -> Decision[float | None]:
    """Return the pause before the restart in seconds, or None to end the run.

    ``max_restarts`` are allowed in a row; a newer checkpoint resets the count. The reason is for the
    user: which restart this is, or why there is none.
    """
    last = history[-1]
    in_a_row = 0
    for attempt in reversed(history):
        in_a_row += 1
        if attempt.got_on:
            break
    never_worked = len(history) == 1 and last.saved is None
    if max_restarts == 0 or (never_worked and last.mistake):
        return Decision(value=None, reason="")  # the cause needs no addition
    if in_a_row > max_restarts:
        reason = f"failed {in_a_row} times; allowed restarts: {max_restarts}"
        if last.saved is not None:
            reason += f"; the last good checkpoint is step {last.saved:,}"
        return Decision(value=None, reason=reason)
    pause_s = 0.0 if in_a_row == 1 else min(2.0 ** (in_a_row - 1), _LONGEST_PAUSE_S)
    return Decision(value=pause_s, reason=f"restart {in_a_row} of {max_restarts}")


def restart_announcement(last: PastAttempt, pause_s: float, reason: str) -> str:
    """Return what failed and where the run resumes: ``…; restarting from step 100 (restart 1 of 3)``."""
    step = "" if last.from_step is None else f" from step {last.from_step:,}"
    when = f" in {pause_s:.0f} s" if pause_s else ""
    return f"{last.finding.what}; restarting{step}{when} ({reason})"


def with_reason(finding: Finding, reason: str) -> Finding:
    """Return why the run failed together with why it was not restarted."""
    return replace(finding, why="\n".join(part for part in (reason, finding.why) if part))


def needs_user(hosts: Sequence[ConnectedHost]) -> bool:
    """Return whether the user must fix the cause, because another attempt would fail the same way.

    This applies to torchmuster's own errors, which name the fix, and to code that cannot be parsed or
    imported. What counts is the rank that failed first.
    """
    failures = []
    for host in hosts:
        if host.ended is not None:
            failures += [(host.ended_s - failure.ago_s, failure) for failure in host.ended.failures]
    if not failures:
        return False
    _, first = min(failures, key=lambda failure: failure[0])
    is_usage = first.exit_code == _USAGE_EXIT_CODE and not first.traceback
    return bool(first.what) or is_usage or first.error.startswith(_MISTAKES)


# ---- the progress of a training


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The newest checkpoint and its step; None where unknown.

    ``resume`` is how the user's own script resumes; torchmuster's own finds its checkpoints itself.
    """

    checkpoint: str | None = None
    saved: int | None = None
    global_batch_size: int | None = None
    resume: "ResumePlan | None" = None


def read_training_progress(
    spec: JobSpec, metrics: Path, known: TrainingProgress
) -> TrainingProgress:
    """Return the progress of a job.

    A storage failure must not stop a run: if checkpoints cannot be read, the ``known`` ones are
    returned.
    """
    if spec.checkpoints is None and is_ours(spec.command):
        return TrainingProgress()
    try:
        if spec.checkpoints is None:
            return _of_script(spec, metrics)
        from torchmuster.checkpoints.manifest import committed_manifests
        from torchmuster.checkpoints.store import open_store

        for newest in committed_manifests(open_store(spec.checkpoints))[:1]:
            return TrainingProgress(
                checkpoint=newest.name,
                saved=newest.step,
                global_batch_size=newest.global_batch_size,
            )
    except Exception:  # from any storage library
        return known
    return TrainingProgress()


def _of_script(spec: JobSpec, metrics: Path) -> TrainingProgress:
    from torchmuster.launch.history.resume import plan_resume

    plan = plan_resume(spec, metrics)
    newest = plan.checkpoint
    if newest is None:
        return TrainingProgress(resume=plan)
    # Scripts overwrite a file with a newer checkpoint.
    name = f"{newest.path} at {newest.at_unix_s}"
    return TrainingProgress(checkpoint=name, saved=newest.step, resume=plan)
