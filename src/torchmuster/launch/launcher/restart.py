"""Decide whether a failed run is restarted, and after which pause; this depends on the progress of its training."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster import untrusted
from torchmuster.decision import Decision
from torchmuster.finding import Finding
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.launch.launcher.host import ConnectedHost

if TYPE_CHECKING:
    from torchmuster.launch.history.resume import ResumePlan

# The same error at the same step this many times is a crash loop.
_LOOP = 3
_LONGEST_PAUSE_S = 30.0
# Errors of code that cannot be parsed or imported, and the exit code of argparse.
_MISTAKES = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "TabError")
_USAGE_EXIT_CODE = 2
# Causes outside of the script, which may come back at any step.
_FROM_OUTSIDE = frozenset({"host-lost", "rank-killed"})
_LAST_BYTES = 64 * 1024
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """A failed attempt and the training progress at its end; steps are None where unknown.

    ``got_on``: it wrote a newer checkpoint. ``saved`` is the newest checkpoint's step and ``reached`` the
    last finished step. ``mistake``: another attempt would fail the same way. ``resumes``: another attempt
    would begin at ``saved``. ``error`` is the text of its error, without who failed.
    """

    finding: Finding
    error: str = ""
    mistake: bool = False
    got_on: bool = False
    saved: int | None = None
    reached: int | None = None
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
    row = _in_a_row(history)
    never_worked = len(history) == 1 and last.saved is None and last.reached is None
    if max_restarts == 0 or (never_worked and last.mistake):
        return Decision(value=None, reason="")  # the cause needs no addition
    alike = list(itertools.takewhile(lambda a: _signature(a) == _signature(last), row[::-1]))
    has_progress = last.saved is not None or last.reached is not None
    if len(alike) >= _LOOP and has_progress and last.finding.name not in _FROM_OUTSIDE:
        where = "before its first step"
        if last.reached is not None:
            where = f"after step {last.reached:,}"
        reason = f"crash loop: failed {len(alike)} times {where} with the same error"
        return Decision(value=None, reason=f"{reason}; {_last_good(last)}")
    if len(row) > max_restarts:
        allowed = "1 restart was" if max_restarts == 1 else f"{max_restarts} restarts were"
        reason = f"failed {len(row)} times; {allowed} allowed"
        if has_progress:
            reason = (
                f"failed {len(row)} times without a newer checkpoint ({allowed} allowed); "
                f"{_last_good(last)}"
            )
        return Decision(value=None, reason=reason)
    pause_s = 0.0 if len(row) == 1 else min(2.0 ** (len(row) - 1), _LONGEST_PAUSE_S)
    return Decision(value=pause_s, reason=f"restart {len(row)} of {max_restarts}")


def restart_announcement(last: PastAttempt, pause_s: float, reason: str) -> str:
    """Return what failed and where the run resumes: ``…; restarting from step 100 (restart 1 of 3)``."""
    step = "" if last.from_step is None else f" from step {last.from_step:,}"
    when = f" in {pause_s:.0f} s" if pause_s else ""
    return f"{last.finding.what}; restarting{step}{when} ({reason})"


def with_reason(finding: Finding, reason: str) -> Finding:
    """Return why the run failed together with why it was not restarted."""
    return replace(finding, why="\n".join(part for part in (reason, finding.why) if part))


def first_failure(hosts: Sequence[ConnectedHost]) -> protocol.Failure | None:
    """Return the failure of the rank that failed first."""
    failures = []
    for host in hosts:
        if host.ended is not None:
            failures += [(host.ended_s - f.ago_s, f) for f in host.ended.failures]
    if not failures:
        return None
    return min(failures, key=lambda failure: failure[0])[1]


def needs_user(failure: protocol.Failure | None) -> bool:
    """Return whether the user must fix the cause, because another attempt would fail the same way.

    This applies to torchmuster's own errors, which name the fix, and to code that cannot be parsed or
    imported.
    """
    if failure is None:
        return False
    is_usage = failure.exit_code == _USAGE_EXIT_CODE and not failure.traceback
    return bool(failure.what) or is_usage or failure.error.startswith(_MISTAKES)


def _in_a_row(history: Sequence[PastAttempt]) -> list[PastAttempt]:
    """Return the last attempts, starting with the one that wrote the newest checkpoint."""
    row: list[PastAttempt] = []
    for attempt in reversed(history):
        row.insert(0, attempt)
        if attempt.got_on:
            break
    return row


def _last_good(last: PastAttempt) -> str:
    if last.saved is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is step {last.saved:,}"


def _signature(attempt: PastAttempt) -> tuple[str, str, int | None, int | None]:
    """Return a key that is equal for equal failures: the error without its numbers, and the steps."""
    error = _NUMBERS.sub("#", attempt.error)
    return attempt.finding.name, error, attempt.reached, attempt.saved


# ---- the progress of a training


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The newest checkpoint and the last finished step; None where unknown.

    ``resume`` is how the user's own script resumes; torchmuster's own finds its checkpoints itself.
    """

    checkpoint: str | None = None
    saved: int | None = None
    global_batch_size: int | None = None
    reached: int | None = None
    resume: "ResumePlan | None" = None


_NOTHING = TrainingProgress()


def read_training_progress(
    spec: JobSpec, metrics: Path, *, since_unix_s: float, known: TrainingProgress = _NOTHING
) -> TrainingProgress:
    """Return the progress of a job, counting only steps finished after ``since_unix_s``.

    A storage failure must not stop a run: if checkpoints cannot be read, the ``known`` ones are
    returned.
    """
    if spec.checkpoints is None and is_ours(spec.command):
        return TrainingProgress()
    reached = _last_step(metrics / "steps.jsonl", since_unix_s)
    try:
        if spec.checkpoints is None:
            return _of_script(spec, metrics, reached)
        from torchmuster.checkpoints.manifest import committed_manifests
        from torchmuster.checkpoints.store import open_store

        for newest in committed_manifests(open_store(spec.checkpoints))[:1]:
            return TrainingProgress(
                checkpoint=newest.name,
                saved=newest.step,
                global_batch_size=newest.global_batch_size,
                reached=reached,
            )
    except Exception:  # from any storage library
        return replace(known, reached=reached)
    return TrainingProgress(reached=reached)


def _of_script(spec: JobSpec, metrics: Path, reached: int | None) -> TrainingProgress:
    from torchmuster.launch.history.resume import plan_resume

    plan = plan_resume(spec, metrics)
    newest = plan.checkpoint
    if newest is None:
        return TrainingProgress(reached=reached, resume=plan)
    # Scripts overwrite a file with a newer checkpoint.
    name = f"{newest.path} at {newest.at_unix_s}"
    return TrainingProgress(checkpoint=name, saved=newest.step, reached=reached, resume=plan)


def _last_step(path: Path, since_unix_s: float) -> int | None:
    try:
        if path.stat().st_mtime < since_unix_s:
            return None
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _LAST_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):  # the last one may be half written
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            return int(untrusted.parse_json(line)["step"])
    return None
