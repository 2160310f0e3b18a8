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
        run, why = _last_trained(runs, root, of_muster_train=kind == "resume")
    else:
        run, why = _last(runs, kind, refuse_several=refuse_several and which is None)
    output.say(f"muster: {run.id}: {why}")
    return run


def _last(runs: Sequence[RunFolder], kind: Kind, *, refuse_several: bool) -> tuple[RunFolder, str]:
    running = [run for run in runs if _is_active(run)]
    if kind == "newest":
        running_ids = [run.id for run in running if run != runs[0]]
        return runs[0], f"the newest run{f'; {running_ids[0]} is running' if running_ids else ''}"
    if len(running) > 1 and refuse_several:
        raise Impossible(
            f"{len(running)} runs are running",
            why=", ".join(run.id for run in running[:_MOST_NAMED]),
            fix=f"name one, for example the newest: {running[0].id}",
        )
    if running:
        return running[0], "it is running" if len(running) == 1 else (
            f"the newest of {len(running)} active runs"
        )
    real = [run for run in runs if not _is_test(run)]
    return (real or runs)[0], "the newest run; none is running"


def _last_trained(
    runs: Sequence[RunFolder], root: Path, *, of_muster_train: bool
) -> tuple[RunFolder, str]:
    left_out: dict[str, str] = {}
    for run in runs:
        if reason := _is_test(run):
            left_out[run.id] = reason
        elif of_muster_train and not run.config.is_file():
            left_out[run.id] = "not started by muster train"
        elif _has_trained(run):
            return run, "the last training run"
        elif of_muster_train and not _has_failed(run):
            # Stopped or killed before its first step line: it still is what the user started last.
            return run, "the last training run, which has not logged a step yet"
        else:
            left_out[run.id] = "it has logged no step and saved no checkpoint"
    raise NoSuchRun(
        f"no training run in {root} can be resumed"
        if of_muster_train
        else f"no run in {root} has trained",
        why="; ".join(f"{name}: {reason}" for name, reason in [*left_out.items()][:_MOST_NAMED]),
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


def _is_test(run: RunFolder) -> str:
    """Return what kind of test a run is; "" for a run of a user's script."""
    job = run_state.read_job(run)
    typed = job.typed[0] if job and job.typed else ""
    if typed == "train" and not run.config.is_file():
        return "a check"  # of muster train --check
    return "a check" if typed == "check" else ""


def _has_trained(run: RunFolder) -> bool:
    """Return whether a run has a step or a checkpoint, or still may get one."""
    for name in ("steps", "evaluations"):
        path = run.metrics / f"{name}.jsonl"
        if path.is_file() and path.stat().st_size:
            return True
    state = run_state.read_state(run) if run.config.is_file() else None
    if state is not None and (state.active or state.phase in ("finished", "saved")):
        return True
    return run.checkpoints.is_dir() and bool(committed_manifests(FolderStore(run.checkpoints)))


def _has_failed(run: RunFolder) -> bool:
    state = run_state.read_state(run)  # none: its launcher was killed before it wrote one
    return state is not None and state.phase == "failed"
