"""Which run a command means by ``last``, or without a run: decided here for all commands."""

import time
from collections.abc import Callable
from pathlib import Path

from torchmuster.checkpoints.store import MARKER
from torchmuster.cli import output
from torchmuster.errors import Impossible, NoSuchRun
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, find_run, list_runs

_MOST_NAMED = 3
# How long a launcher may take to write the job into its new run folder.
_LAUNCHED_WITHIN_S = 5.0


def any_run(run: RunFolder) -> bool:
    """Accept every run."""
    return True


def has_trained(run: RunFolder) -> bool:
    """Accept a run with a step line or a checkpoint, and a training that has not failed before them."""
    if (run.metrics / "steps.jsonl").is_file() or any(run.checkpoints.glob(f"*/{MARKER}")):
        return True
    state = run_state.read_state(run)  # none: its launcher was killed before it wrote one
    return run.config.is_file() and (state is None or state.phase != "failed")


def is_of_muster_train(run: RunFolder) -> bool:
    """Accept a run that ``muster train --resume`` can continue."""
    return run.config.is_file() and has_trained(run)


def choose_run(
    which: str | None,
    root: Path,
    wanted: Callable[[RunFolder], bool] = any_run,
    *,
    active_first: bool = False,
    refuse_several: bool = False,
) -> RunFolder:
    """Find a run by id or folder, or the last one that is wanted, and print which one was taken.

    ``active_first`` prefers runs that are not over, and passes over those of muster check. ``refuse_several``
    refuses to choose between several active ones if no run is named.
    """
    if which is not None and (which != "last" or RunFolder(Path(which).resolve()).marker.is_file()):
        return find_run(which, root)
    runs = sorted(list_runs(root), key=_last_change_unix_s, reverse=True)
    if not runs:
        raise NoSuchRun(
            f"there are no runs in {root}",
            fix="start one: muster run script.py; runs in another folder: --runs DIR",
        )
    candidates = [run for run in runs if wanted(run)]
    if active_first:
        active = [run for run in candidates if _is_active(run)]
        if len(active) > 1 and refuse_several and which is None:
            raise Impossible(
                f"{len(active)} runs are running",
                why=", ".join(run.id for run in active[:_MOST_NAMED]),
                fix=f"name one, for example the newest: {active[0].reference}",
            )
        candidates = active or [run for run in runs if not _is_check(run)] or runs
    if not candidates:
        newest = ", ".join(run.id for run in runs[:_MOST_NAMED])
        raise NoSuchRun(
            f"there is no training run in {root}",
            why=f"{newest}: a check, not started by muster train, or failed before the first step",
            fix="start one: muster train --config config.yaml; to see all: muster runs",
        )
    run = candidates[0]
    state = run_state.read_state(run)
    output.say(f"muster: {run.id} ({'starting' if state is None else state.phase})")
    return run


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
    job = run_state.read_job(run)
    return job is not None and job.typed[:1] == ["check"]
