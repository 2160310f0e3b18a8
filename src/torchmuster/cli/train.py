"""``muster train``: train from a settings file, on one or more hosts."""

import argparse
import dataclasses
import functools
import json
import os
import shlex
import sys
import time
from pathlib import Path

from torchmuster import untrusted
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import open_store
from torchmuster.cli import job_flags, node_group, output, parsers, slurm_run
from torchmuster.cli.config import settings_from
from torchmuster.cli.data_check import check_data, show_data
from torchmuster.cli.launching import start, transport_for
from torchmuster.cli.scripts import Script
from torchmuster.cli.which_run import choose_run
from torchmuster.config.here import check_here
from torchmuster.config.layers import Flag, Strength
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.training import (
    check_trainable,
    checkpoint_place,
    paths_for_ranks,
    with_absolute_folder,
)
from torchmuster.config.written import settings_arguments, settings_yaml
from torchmuster.errors import ExitCode, Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.history.run_state import SILENT_AFTER_S
from torchmuster.launch.job import JobSpec
from torchmuster.launch.node import process_cleanup
from torchmuster.plan.answer import Answer, as_settings
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.hardware.described import describe_hardware
from torchmuster.plan.proof.comparison import Promise
from torchmuster.plan.request import request_from_settings
from torchmuster.plan.search import make_plan
from torchmuster.plan.tracing.cache import cache_folder
from torchmuster.plan.tracing.tracer import Tracer
from torchmuster.redaction import HIDDEN
from torchmuster.runfolder import (
    RunFolder,
    create_run_folder,
    refuse_foreign,
    write_atomically,
)
from torchmuster.units import format_seconds


def follow_plan(options: argparse.Namespace, resolved: Resolved) -> tuple[Resolved, Promise]:
    """Plan for this machine, apply the plan to settings and flags, and return its prediction."""
    _refuse_other_machines(options, resolved)
    check_here(resolved)  # before tracing, which takes long
    settings = resolved.settings
    hardware = here.hardware_from_settings(settings, ranks=options.ranks, device=options.device)
    answer = _answer(resolved, hardware)
    best, asked = answer.chosen.value, answer.asked
    output.say(f"plan: {answer.chosen.reason}")
    if answer.findings:
        output.show_findings(list(answer.findings), sys.stderr)
    chosen = as_settings(best.candidate, asked, gpu_ids=settings.distributed.gpu_ids)
    options.set += [Flag(flag="--plan", path=path, text=text) for path, text in chosen.items()]
    if asked.hardware.card.kind == "cpu":
        options.ranks = best.candidate.layout.ranks
    else:  # the plan may use fewer GPUs than the flags request
        options.ranks = options.num_gpus = options.gpu_ids = None
    promise = Promise(
        candidate=best.candidate,
        hardware=describe_hardware(asked.hardware),
        tensor_bytes=best.memory.tensor_bytes,
        step_s=None if best.time is None else best.time.step_s,
    )
    return settings_from(options), promise


def _refuse_other_machines(options: argparse.Namespace, resolved: Resolved) -> None:
    if options.resume:
        raise Impossible(
            "--plan and --resume were both given",
            why="a resumed run keeps the plan that it was started with",
            fix="leave out --plan",
        )
    if options.slurm or resolved.settings.launch.hosts:
        raise Impossible(
            "--plan plans for this machine, but the training would run on others",
            fix="muster plan --hardware … --write plan.yaml, then muster train --config plan.yaml",
        )


def _answer(resolved: Resolved, hardware: Hardware) -> Answer:
    asked = request_from_settings(resolved, hardware, folder=str(Path.cwd()))
    with Tracer(cache=cache_folder(), say=output.say) as tracer:
        return make_plan(asked, tracer.records)


# torch's segments that can grow: less memory is lost between tensors of changing sizes.
ALLOCATOR_SETTING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# These may change when a run is resumed; all others define the training.
_MAY_CHANGE = (
    *("distributed.", "launch.", "checkpoint.every", "checkpoint.keep"),
    *("train.epochs", "train.steps", "train.micro_batch_size", "train.clip_norm"),
    *("train.precision", "train.activation_checkpointing", "train.compile"),
    *("train.log_every", "train.evaluate_every", "train.early_stopping_"),
    *("data.workers", "data.evaluation_", "model.device_map"),
    "metrics.",
)
_LENGTHS = ("train.epochs", "train.steps")
# Changes of these let a finished run continue.
_LONGER = (*_LENGTHS, "train.early_stopping_patience")
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")  # these do not depend on the end
# Time that a node agent may take to exit after the ranks' grace period.
_BEYOND_GRACE_S = 10.0
_KILLED_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.25


def take_run(options: argparse.Namespace) -> RunFolder:
    """Find the run that ``--resume`` names, and apply its settings and its job to the options."""
    run = choose_run(options.resume, options.runs, "resume")
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
        raise NotNow(
            f"{run.id} is still active ({state.phase})",
            fix=f"muster logs {run.id} -f follows it; muster stop {run.id} stops it"
            + _if_gone(run),
        )
    if not options.dry_run:
        refuse_foreign(run, "resume")
        _await_processes_left(run)
    options.config = run.config
    _take_job(run, options)
    return run


def _await_processes_left(run: RunFolder) -> None:
    """Wait for the processes that a killed launcher left on this host: ranks may be saving."""
    job = run_state.read_job(run)
    if (
        job is None
        or not job.token
        or not process_cleanup.processes_of(job.token, owner=os.geteuid())
    ):
        return
    within_s = job.grace_s + _BEYOND_GRACE_S
    output.say(
        f"muster: waiting up to {within_s:.0f} s for the processes of {run.id} to save and exit: "
        "its launcher was killed"
    )
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s and process_cleanup.processes_of(
        job.token, owner=os.geteuid()
    ):
        time.sleep(_LOOK_EVERY_S)
    if left := process_cleanup.kill_processes(
        job.token, within_s=_KILLED_WITHIN_S, owner=os.geteuid()
    ):
        raise NotNow(
            f"processes of {run.id} are still running: {', '.join(str(process.pid) for process in left)}",
            why="they do not react to SIGKILL because they are blocked in a driver or in disk I/O",
            fix="run dmesg to see what they wait for, or reboot the host",
        )


def _if_gone(run: RunFolder) -> str:
    job = run_state.read_job(run)
    if job is None or job.launcher.is_of_this_machine:
        return ""
    known = format_seconds(SILENT_AFTER_S)
    return f"; if {job.launcher.host} is down, the run counts as dead {known} after its last update"


def _take_job(run: RunFolder, options: argparse.Namespace) -> None:
    """Use the device type and the ranks that the run had, unless flags override them."""
    try:
        spec = untrusted.read_json(run.job)["spec"]
        device, ranks = spec["device"], spec["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if options.device == "auto" and device in ("gpu", "cpu"):
        options.device = device
        if options.ranks is None and isinstance(ranks, int) and device == "cpu":
            options.ranks = ranks


def nothing_left(run: RunFolder, resolved: Resolved) -> bool:
    """Report changed settings and reject forbidden changes; return whether the run is finished."""
    before = with_absolute_folder(resolve_settings(file=run.config)).values()
    now = resolved.values()
    changed = {path: now[path] for path in now if now[path] != before[path]}
    _refuse(run, resolved, before, changed)
    _check_checkpoint(run, resolved)
    state = run_state.read_state(run)
    if state is not None and state.phase == "finished" and not changed.keys() & set(_LONGER):
        given = next((path for path in _LENGTHS if now[path]), _LENGTHS[0])
        output.say(
            f"muster: {run.id} has finished: nothing left to train\n"
            f"        to train longer: muster train --resume {run.id} --set {given}=…"
            + (
                "\n        after an early stop: --set train.early_stopping_patience=…"
                if now["train.early_stopping_patience"]
                else ""
            )
        )
        return True
    for path, value in changed.items():
        output.say(
            f"muster: {path} is now {_train_shown(value)}; it was {_train_shown(before[path])}"
        )
    if changed.keys() & set(_LENGTHS) and now["train.schedule"] not in _ENDLESS:
        output.say(
            f"muster: the {now['train.schedule']} schedule decays to "
            f"{now['train.min_learning_rate']:g} at the new end, so the learning rate changes from "
            "this step on"
        )
    return False


def _refuse(
    run: RunFolder, resolved: Resolved, before: dict[str, object], changed: dict[str, object]
) -> None:
    for path, value in resolved.values().items():
        if HIDDEN in str(value):
            raise Impossible(
                f"{path} is {value!r} in {run.config}",
                why="secrets are not saved in a run's settings",
                fix=f"give it again: --set {path}=…",
            )
    for path, value in changed.items():
        hidden = HIDDEN in str(before[path])
        if not path.startswith(_MAY_CHANGE) and not hidden:
            raise Impossible(
                f"{path} is {_train_shown(value)} ({resolved.sources[path].where}), but {run.id} has "
                f"{_train_shown(before[path])}",
                why="this setting defines the training run, so a resumed run cannot change it",
                fix="leave it out, or start a new run: muster train --config "
                f"{shlex.quote(str(run.config))} --set {path}=…",
            )


def _check_checkpoint(run: RunFolder, resolved: Resolved) -> None:
    """Report if there is no checkpoint yet; reject a run that saves none."""
    place = checkpoint_place(resolved.settings.checkpoint, run.path.resolve())
    if place is None:
        raise Impossible(
            f"{run.id} cannot be resumed: it saves no checkpoints",
            why="checkpoint.every is never",
            fix=f"start a new run: muster train --config {shlex.quote(str(run.config))}",
        )
    if not committed_manifests(open_store(place)):
        output.say(f"muster: {run.id} has no checkpoint in {place}: starting from step 0")


def _train_shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


WORKER = "torchmuster.worker"
_DEVICES = {"auto": "auto", "cuda": "gpu", "cpu": "cpu"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster train``."""
    parser.description = (
        f"{parser.description}\nChecks the settings, claims the devices, starts a rank on each, and "
        "trains; the weights are saved in\nthe run folder. To start your own training script, use "
        f"muster run.\nThe same under torchrun: torchrun … -m {WORKER} --config config.yaml"
    )
    parsers.show_examples(
        parser,
        [
            "muster train --config config.yaml                    all free GPUs of this machine",
            "muster train --config config.yaml --num-gpus 2       two free GPUs",
            "muster train --config config.yaml --device cpu --ranks 2    two ranks on the CPU",
            "muster train --config config.yaml --set train.steps=100     override a setting",
            "muster train --config config.yaml --hosts a,b        two hosts over ssh",
            "muster train --config config.yaml --plan             plan for this machine first",
            "muster train --config config.yaml --dry-run          show what would be started",
            "muster train --resume last                           resume the last training run",
            "muster train --resume last --set train.steps=2000    resume it, and train longer",
        ],
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume a run (its id, its folder, or: last) from its newest good checkpoint",
    )
    job_flags.add_machine_flags(parser)
    many = job_flags.add_rendezvous_flags(parser)
    job_flags.add_host_flags(many)
    job_flags.add_spares_flag(many)
    slurm_run.add_flags(parser)
    when = job_flags.add_run_flags(
        parser,
        named="experiment_name",
        usual_restarts=job_flags.USUAL_RESTARTS,
    )
    job_flags.add_unattended_flags(when)
    when.add_argument(
        "--check", action="store_true", help="check the hosts and their connections first"
    )
    when.add_argument(
        "--plan",
        action="store_true",
        help="plan for this machine, train with the plan, and report its accuracy after step 3",
    )
    when.add_argument("--detach", action="store_true", help="run in the background")
    when.add_argument("--dry-run", action="store_true", help="show what would be started, and exit")
    when.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.set_defaults(run=_run_train, command=None)


def _run_train(options: argparse.Namespace) -> int:
    if options.json and not options.dry_run:
        raise Impossible(
            "--json works only with --dry-run",
            why="a run prints the output of its ranks",
            fix="leave out --json; the metrics are in the run folder: metrics/steps.jsonl",
        )
    group = node_group.take_group(options)
    if group is not None and (code := node_group.ended_before(group, options.runs)) is not None:
        return code
    if group is not None and group.node_rank > 0:
        return node_group.serve(group, options)
    run = take_run(options) if options.resume else None
    if group is not None:
        run = group.earlier_run(options.runs)
    resolved = with_absolute_folder(job_flags.settings_of(options))
    check_trainable(resolved, file=str(options.config or "the settings"))
    if run is not None and run.config.is_file() and nothing_left(run, resolved):
        return ExitCode.GOOD
    promise = None
    if options.plan:
        resolved, promise = follow_plan(options, resolved)
    spec = _job(options, resolved)
    is_here = not options.slurm and not spec.hosts  # on other hosts, the ranks check
    if is_here:
        check_here(resolved)
    data = _CheckedData()
    python = resolved.settings.launch.remote_python or sys.executable
    if options.check and not options.dry_run and not options.slurm:
        code = _check_train(options, spec, python)
        if code != ExitCode.GOOD:
            return code
    return start(
        options,
        spec,
        python,
        in_folder=functools.partial(_in_folder, resolved=resolved),
        check=functools.partial(data.check, resolved) if is_here else _nothing,
        prepare=functools.partial(_write_files, resolved=resolved, promise=promise, data=data),
        run=run,
        group=group,
    )


def _job(options: argparse.Namespace, resolved: Resolved) -> JobSpec:
    """Build the job whose ranks run the worker from flags and settings."""
    if resolved.sources["experiment_name"].strength is Strength.DEFAULT and not options.name:
        options.name = "train"
    _choose_device(options, resolved)
    if not resolved.settings.distributed.enabled:
        if (options.ranks or 1) > 1 or resolved.settings.launch.hosts:
            raise Impossible(
                "several processes were requested, but distributed.enabled is false",
                why=f"set by {resolved.sources['distributed.enabled'].where}",
                fix="leave out --ranks and the hosts, or --set distributed.enabled=true",
            )
        options.ranks = 1
    words = [WORKER, *settings_arguments(resolved, paths_for_ranks())]
    spec = job_flags.job_from(options, resolved, Script(command=tuple(words), module=True))
    if spec.device == "cpu":
        return dataclasses.replace(spec, command=(*spec.command, "--device", "cpu"))
    if any(name.endswith("_ALLOC_CONF") for name in spec.environment):
        return spec  # set by the user
    name, value = ALLOCATOR_SETTING
    return dataclasses.replace(spec, environment={**spec.environment, name: value})


def _choose_device(options: argparse.Namespace, resolved: Resolved) -> None:
    """Choose the device by ``model.device_map`` if no flag does."""
    if options.device != "auto":
        return
    options.device = _DEVICES[resolved.settings.model.device_map]
    asked = resolved.settings.distributed.num_gpus or resolved.settings.distributed.gpu_ids
    if options.device == "cpu" and asked:
        name = "num_gpus" if resolved.settings.distributed.num_gpus else "gpu_ids"
        raise Impossible(
            "model.device_map is cpu, but GPUs were requested",
            why=f"model.device_map is set by {resolved.sources['model.device_map'].where}, "
            f"distributed.{name} by {resolved.sources[f'distributed.{name}'].where}",
            fix="leave out one of the two; --device cpu overrides both",
        )


def _in_folder(spec: JobSpec, folder: Path, *, resolved: Resolved) -> JobSpec:
    words = ("--run-folder", str(folder.resolve()))
    place = checkpoint_place(resolved.settings.checkpoint, folder.resolve())
    return dataclasses.replace(spec, command=(*spec.command, *words), checkpoints=place)


class _CheckedData:
    """What the data is, once it was checked."""

    report: dict[str, object] | None = None

    def check(self, resolved: Resolved) -> None:
        self.report = check_data(resolved)
        if self.report is not None:
            show_data(self.report)


def _nothing() -> None:
    pass


def _write_files(
    run: RunFolder, *, resolved: Resolved, promise: "Promise | None", data: _CheckedData
) -> None:
    write_atomically(run.config, settings_yaml(resolved))
    if data.report is not None:
        write_atomically(run.data, json.dumps(data.report))
    if promise is not None:
        from torchmuster.plan.proof import comparison

        comparison.write_promise(run.path, promise)


def _check_train(options: argparse.Namespace, spec: JobSpec, python: str) -> int:
    """Check the hosts and their connections; the run does not start if a check fails."""
    from torchmuster.cli import check

    transport = slurm_run.transport_inside(spec) or transport_for(spec, python)
    return check.examine(spec, transport, create_run_folder(options.runs, "check"), quick=True)
