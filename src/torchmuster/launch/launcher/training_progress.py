"""Read the training progress from checkpoints and metrics."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from torchmuster import untrusted
from torchmuster.launch.history.resume import ResumePlan, plan_resume
from torchmuster.launch.job import JobSpec, is_ours

_LAST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The newest checkpoint and the last finished step; None where unknown.

    ``resume`` is how the user's own script resumes; torchmuster's own finds its checkpoints itself.
    """

    checkpoint: str | None = None
    saved: int | None = None
    global_batch_size: int | None = None
    reached: int | None = None
    resume: ResumePlan | None = None


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
