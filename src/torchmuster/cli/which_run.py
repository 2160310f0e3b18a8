"""Which run a command means by ``last``, or without a run: decided here for all commands."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.cli import output
from torchmuster.errors import Impossible, NoSuchRun
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, find_run, list_runs

# running: the running one, else the newest; training: the newest that trained; resume: of muster
# train; newest: whatever it is.
Kind = Literal["running", "newest", "training", "resume"]
_MOST_NAMED = 3
# How long a launcher may take to write the job into its new run folder.
_LAUNCHED_WITHIN_S = 5.0


def choose_run(
    which: str | None, root: Path, kind: Kind, *, refuse_several: bool = False
) -> RunFolder:
    """Find a run by id or folder, or the last one of a kind; print which one was taken, and why.

    ``refuse_several`` refuses to choose between several running ones if no run is named.
    """
    if which is not None and (which != "last" or RunFolder(Path(which).resolve()).marker.is_file()):
        return find_run(which, root)
    runs = sorted(list_runs(root), key=_last_change_unix_s, reverse=True)
    if not runs:
        raise NoSuchRun(
            f"there are no runs in {root}",
            fix="start one: muster run script.py; runs in another folder: --runs DIR",
        )
    if kind in ("training", "resume"):
        run, why = _last_trained(runs, root, kind), "the last training run"
    else:
        running = [run for run in runs if _is_active(run)]
        if kind == "newest":
            run, why = runs[0], "the newest run"
            if running and run not in running:
                why = f"the newest run; {running[0].id} is running"
        elif len(running) > 1 and refuse_several and which is None:
            raise Impossible(
                f"{len(running)} runs are running",
                why=", ".join(run.id for run in running[:_MOST_NAMED]),
                fix=f"name one, for example the newest: {running[0].id}",
            )
        elif running:
            run, why = running[0], "it is running"
            if len(running) > 1:
                why = f"the newest of {len(running)} running"
        else:
            run = next((run for run in runs if not _is_check(run)), runs[0])
            why = "the newest run; none is running"
    output.say(f"muster: {run.id}: {why}")
    return run


def _last_trained(runs: Sequence[RunFolder], root: Path, kind: Kind) -> RunFolder:
    left_out = []
    for run in runs:
        if _has_trained(run) and (kind == "training" or run.config.is_file()):
            return run
        left_out.append(run.id)
    raise NoSuchRun(
        f"there is no training run in {root}",
        why=f"{', '.join(left_out[:_MOST_NAMED])}: a check, not started by muster train, or failed before the first "
        "step",
        fix="start one: muster train --config config.yaml; to see all: muster runs",
    )


def _last_change_unix_s(run: RunFolder) -> float:
    """Return when a run ended or entered its phase: one that was resumed is newer than its id."""
    state = run_state.read_state(run)
    return run.marker.stat().st_mtime if state is None else state.since_unix_s


def _is_active(run: RunFolder) -> bool:
    """Return whether a run is not over, even if it is so new that it has no state yet."""
    state = run_state.read_state(run)
    if state is not None:
        return state.active
    job = run_state.read_job(run)
    if job is not None:
        return job.launcher.process() is not None
    return 0 <= time.time() - run.marker.stat().st_mtime < _LAUNCHED_WITHIN_S


def _is_check(run: RunFolder) -> bool:
    """Return whether a run is one of muster check, or of muster train --check."""
    job = run_state.read_job(run)
    typed = job.typed[0] if job and job.typed else ""
    return typed == "check" or (typed == "train" and not run.config.is_file())


def _has_trained(run: RunFolder) -> bool:
    """Return whether a run has a step or a checkpoint, or is a training that has not failed before."""
    if _is_check(run):
        return False
    for name in ("steps", "evaluations"):
        path = run.metrics / f"{name}.jsonl"
        if path.is_file() and path.stat().st_size:
            return True
    if run.checkpoints.is_dir() and committed_manifests(FolderStore(run.checkpoints)):
        return True
    state = run_state.read_state(run)  # none: its launcher was killed before it wrote one
    return run.config.is_file() and (state is None or state.phase != "failed")
