"""``muster train --resume``: continue a run with its own settings, and refuse changes that would make it another."""

import dataclasses
import os
import shlex
import time

from torchmuster import untrusted
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import open_store
from torchmuster.cli import output
from torchmuster.cli.launch_options import TrainOptions
from torchmuster.cli.which_run import choose_run, is_of_muster_train
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.training import checkpoint_place, with_absolute_folder
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.history.run_state import SILENT_AFTER_S
from torchmuster.launch.node import process_cleanup
from torchmuster.redaction import HIDDEN
from torchmuster.runfolder import RunFolder, refuse_foreign
from torchmuster.units import format_seconds

# These may change when a run is resumed; all others define the training.
_MAY_CHANGE = (
    *("distributed.", "launch.", "checkpoint.every", "checkpoint.keep"),
    *("train.epochs", "train.steps", "train.micro_batch_size", "train.clip_norm"),
    *("train.precision", "train.activation_checkpointing", "train.compile"),
    *("train.log_every", "train.evaluate_every"),
    *("data.workers", "data.evaluation_", "model.device_map"),
    "metrics.",
)
_LENGTHS = ("train.epochs", "train.steps")
# Time that a node agent may take to exit after the ranks' grace period.
_BEYOND_GRACE_S = 10.0
_KILLED_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.25


def take_run(options: TrainOptions) -> tuple[RunFolder, TrainOptions]:
    """Find the run that ``--resume`` names; return it, and the options with its settings and devices."""
    run = choose_run(str(options.resume), options.runs, is_of_muster_train)
    if options.config is not None:
        raise Impossible(
            f"--resume {options.resume} and --config {options.config} were both given",
            why=f"a run is resumed with its own settings, {run.config}",
            fix="leave out --config; change individual settings with --set",
        )
    if not run.config.is_file():
        raise Impossible(
            f"{run.id} cannot be resumed: it has no settings",
            why=f"{run.config} does not exist, so the run was not started by muster train",
            fix="give a run of muster train; muster runs lists all runs",
        )
    state = run_state.read_state(run)
    if state is not None and state.active:
        fix = f"muster logs {run.reference} -f follows it; muster stop {run.reference} stops it"
        job = run_state.read_job(run)
        if job is not None and not job.launcher.is_of_this_machine:
            known = format_seconds(SILENT_AFTER_S)
            fix += f"; if {job.launcher.host} is down, the run counts as dead {known} after its last update"
        raise NotNow(f"{run.id} is still active ({state.phase})", fix=fix)
    if not options.dry_run:
        refuse_foreign(run, "resume")
        _await_processes_left(run)
    return run, _with_its_job(run, dataclasses.replace(options, config=run.config))


def _await_processes_left(run: RunFolder) -> None:
    """Wait for the processes that a killed launcher left on this host: ranks may be saving."""
    job = run_state.read_job(run)
    owner = os.geteuid()
    if job is None or not job.token or not process_cleanup.processes_of(job.token, owner=owner):
        return
    within_s = job.grace_s + _BEYOND_GRACE_S
    output.say(
        f"muster: waiting up to {within_s:.0f} s for the processes of {run.id} to save and exit: "
        "its launcher was killed"
    )
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s and process_cleanup.processes_of(job.token, owner=owner):
        time.sleep(_LOOK_EVERY_S)
    left = process_cleanup.kill_processes(job.token, within_s=_KILLED_WITHIN_S, owner=owner)
    if left:
        raise NotNow(
            f"processes of {run.id} are still running: {', '.join(str(process.pid) for process in left)}",
            why="they do not react to SIGKILL because they are blocked in a driver or in disk I/O",
            fix="run dmesg to see what they wait for, or reboot the host",
        )


def _with_its_job(run: RunFolder, options: TrainOptions) -> TrainOptions:
    """Return the options with the device type and the ranks that the run had, unless flags override them."""
    try:
        spec = untrusted.read_json(run.job)["spec"]
        device, ranks = spec["device"], spec["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return options
    if options.device != "auto" or device not in ("gpu", "cpu"):
        return options
    if options.ranks is not None or not isinstance(ranks, int) or device == "gpu":
        ranks = options.ranks
    return dataclasses.replace(options, device=device, ranks=ranks)


def nothing_left(run: RunFolder, resolved: Resolved) -> bool:
    """Reject changes that would make it another training; return whether the run is finished."""
    before = with_absolute_folder(resolve_settings(file=run.config)).values()
    now = resolved.values()
    changed = [path for path in now if now[path] != before[path]]
    for path in now:
        if HIDDEN in str(now[path]):
            raise Impossible(
                f"{path} is {now[path]!r} in {run.config}",
                why="secrets are not saved in a run's settings",
                fix=f"give it again: --set {path}=…",
            )
    for path in changed:
        if not path.startswith(_MAY_CHANGE) and HIDDEN not in str(before[path]):
            raise Impossible(
                f"{path} is {now[path]!r} ({resolved.sources[path].where}), but {run.id} has "
                f"{before[path]!r}",
                why="this setting defines the training run, so a resumed run cannot change it",
                fix="leave it out, or start a new run: muster train --config "
                f"{shlex.quote(str(run.config))} --set {path}=…",
            )
    place = checkpoint_place(resolved.settings.checkpoint, run.path.resolve())
    if place is None:
        raise Impossible(
            f"{run.id} cannot be resumed: it saves no checkpoints",
            why="checkpoint.every is never",
            fix=f"start a new run: muster train --config {shlex.quote(str(run.config))}",
        )
    if not committed_manifests(open_store(place)):
        output.say(f"muster: {run.id} has no checkpoint in {place}: starting from step 0")
    state = run_state.read_state(run)
    if state is not None and state.phase == "finished" and set(changed).isdisjoint(_LENGTHS):
        given = next((path for path in _LENGTHS if now[path]), _LENGTHS[0])
        output.say(
            f"muster: {run.id} has finished: nothing left to train\n"
            f"        to train longer: muster train --resume {run.reference} --set {given}=…"
        )
        return True
    return False
