"""``muster train --resume RUN``: the run goes on in its own folder, with its own settings."""

import argparse
import json
import shlex
import time

from torchmuster.checkpoints.manifest import committed
from torchmuster.checkpoints.places import open_store
from torchmuster.cli import output
from torchmuster.config.resolve import Resolved, resolve
from torchmuster.config.training import checkpoint_place, with_absolute_folder
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.history.launcher_heartbeat import SILENT_AFTER_S
from torchmuster.launch.node import process_cleanup
from torchmuster.redaction import HIDDEN
from torchmuster.runfolder import RunFolder, find
from torchmuster.units import format_seconds

# These say how a training is computed and for how long; all others say which training it is.
_MAY_CHANGE = (
    *("distributed.", "launch.", "checkpoint.every", "checkpoint.keep", "checkpoint.mode"),
    *("train.epochs", "train.steps", "train.micro_batch_size", "train.clip_norm"),
    *("train.precision", "train.activation_checkpointing", "train.compile"),
    *("train.on_bad_numbers", "train.log_every", "train.evaluate_every"),
    *("data.workers", "data.prefetch", "data.evaluation_", "model.device_map"),
    *("model.attention", "metrics."),
)
_LENGTHS = ("train.epochs", "train.steps")
# What a node agent may take beyond the ranks' grace period to exit.
_BEYOND_GRACE_S = 10.0
_KILLED_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.25


def take_run(options: argparse.Namespace) -> RunFolder:
    """Find the run that ``--resume`` names, and let its settings and its job be those of the options."""
    run = find(options.resume, options.runs)
    if options.config is not None:
        raise Impossible(
            f"--resume {options.resume} and --config {options.config} were both given",
            why=f"a run goes on with its own settings, {run.config}",
            fix="leave out --config; --set changes what may change",
        )
    if not run.config.is_file():
        raise Impossible(
            f"{run.id} cannot go on: it has no settings",
            why=f"{run.config} is not there, so it was not started by muster train",
            fix="give a run of muster train; muster runs lists what there is",
        )
    state = run_state.read_state(run)
    if state is not None and state.active:
        raise NotNow(
            f"{run.id} is still at work ({state.phase})",
            fix=f"muster attach {run.id} shows how it goes; muster stop {run.id} ends it"
            + _if_gone(run),
        )
    if not options.dry_run:
        _await_processes_left(run)
    options.config = run.config
    _take_job(run, options)
    return run


def _await_processes_left(run: RunFolder) -> None:
    """Wait for what a killed launcher left on this host: its ranks may be saving."""
    job = run_state.read_job(run)
    if job is None or not job.token or not process_cleanup.processes_of(job.token):
        return
    within_s = job.grace_s + _BEYOND_GRACE_S
    output.say(
        f"muster: waiting up to {within_s:.0f} s for the processes of {run.id} to save and exit: "
        "its launcher was killed"
    )
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s and process_cleanup.processes_of(job.token):
        time.sleep(_LOOK_EVERY_S)
    if left := process_cleanup.kill(job.token, within_s=_KILLED_WITHIN_S):
        raise NotNow(
            f"processes of {run.id} are still running: {', '.join(str(process.pid) for process in left)}",
            why="they do not react to SIGKILL: they wait for a driver or a disk",
            fix="see dmesg for what they wait for, or restart the host",
        )


def _if_gone(run: RunFolder) -> str:
    job = run_state.read_job(run)
    if job is None or job.launcher.is_of_this_machine:
        return ""
    known = format_seconds(SILENT_AFTER_S)
    return f"; should {job.launcher.host} be gone, that is known {known} after it was last heard of"


def _take_job(run: RunFolder, options: argparse.Namespace) -> None:
    """Let the run have the kind of device and the ranks that it had, unless flags say otherwise."""
    try:
        spec = json.loads(run.job.read_text(encoding="utf-8"))["spec"]
        device, ranks = spec["device"], spec["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if options.device == "auto" and device in ("gpu", "cpu"):
        options.device = device
        if options.ranks is None and isinstance(ranks, int) and device == "cpu":
            options.ranks = ranks


def nothing_left(run: RunFolder, resolved: Resolved) -> bool:
    """Say what will change, and refuse what may not; return whether the run has reached its end already."""
    before = with_absolute_folder(resolve(file=run.config)).values()
    now = resolved.values()
    changed = {path: now[path] for path in now if now[path] != before[path]}
    _refuse(run, resolved, before, changed)
    _check_checkpoint(run, resolved)
    state = run_state.read_state(run)
    if state is not None and state.phase == "finished" and not changed.keys() & set(_LENGTHS):
        given = next((path for path in _LENGTHS if now[path]), _LENGTHS[0])
        output.say(
            f"muster: {run.id} has finished: nothing is left to train\n"
            f"        to train on: muster train --resume {run.id} --set {given}=…"
        )
        return True
    for path, value in changed.items():
        output.say(f"muster: {path} is {_shown(value)} from now on; it was {_shown(before[path])}")
    if changed.keys() & set(_LENGTHS) and now["train.schedule"] != "constant":
        output.say(
            f"muster: the schedule {now['train.schedule']} goes to 0 at the new end, so the learning "
            "rate is another one from now on"
        )
    return False


def _refuse(
    run: RunFolder, resolved: Resolved, before: dict[str, object], changed: dict[str, object]
) -> None:
    for path, value in resolved.values().items():
        if HIDDEN in str(value):
            raise Impossible(
                f"{path} is {value!r} in {run.config}",
                why="secrets are not written down with a run's settings",
                fix=f"give it again: --set {path}=…",
            )
    for path, value in changed.items():
        hidden = HIDDEN in str(before[path])
        if not path.startswith(_MAY_CHANGE) and not hidden:
            raise Impossible(
                f"{path} is {_shown(value)} ({resolved.sources[path].where}), but {run.id} has "
                f"{_shown(before[path])}",
                why="a run goes on as it began: with this it would be another training",
                fix="leave it out, or begin a new run: muster train --config "
                f"{shlex.quote(str(run.config))} --set {path}=…",
            )


def _check_checkpoint(run: RunFolder, resolved: Resolved) -> None:
    """Say so if there is no checkpoint yet; refuse a run that saves none."""
    place = checkpoint_place(resolved.settings.checkpoint, run.path.resolve())
    if place is None:
        raise Impossible(
            f"{run.id} cannot be resumed: it saves no checkpoints",
            why="checkpoint.enabled is false",
            fix=f"start a new run: muster train --config {shlex.quote(str(run.config))}",
        )
    if not committed(open_store(place)):
        output.say(f"muster: {run.id} has no checkpoint in {place}: starting from step 0")


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
