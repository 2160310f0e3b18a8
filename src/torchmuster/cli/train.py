"""``muster train``: a settings file becomes ranks that train, on this machine or on many."""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import job_flags, parsers, resuming, slurm_run
from torchmuster.cli.launching import start, transport_for
from torchmuster.cli.scripts import Script
from torchmuster.config.here import check_here
from torchmuster.config.layers import Strength
from torchmuster.config.resolve import Resolved
from torchmuster.config.training import (
    check_trainable,
    checkpoint_place,
    paths_for_ranks,
    with_absolute_folder,
)
from torchmuster.config.written import as_words, as_yaml
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder, create, write_atomically

if TYPE_CHECKING:
    from torchmuster.plan.proof.comparison import Promise

WORKER = "torchmuster.worker"
_TO_SAVE_S = 30.0  # for ranks that are asked to end; Slurm and Kubernetes give them as long
# torch's allocator on GPUs: segments that grow leave fewer gaps between tensors, and muster plan counts with them.
ALLOCATOR_SETTING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
_DEVICES = {"auto": "auto", "cuda": "gpu", "cpu": "cpu"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster train``."""
    parser.description = (
        f"{parser.description}\nChecks the settings, claims the devices, starts a rank on each, and "
        "trains; the weights end up in\nthe run's folder. A training script of your own is started by "
        f"muster run.\nThe same under torchrun: torchrun … -m {WORKER} --config config.yaml"
    )
    parsers.show_examples(
        parser,
        [
            "muster train --config config.yaml                    all free GPUs of this machine",
            "muster train --config config.yaml --num-gpus 2       two of them",
            "muster train --config config.yaml --device cpu --ranks 2    two ranks on the CPU",
            "muster train --config config.yaml --set train.steps=100     another value for once",
            "muster train --config config.yaml --hosts a,b        two machines over ssh",
            "muster train --config config.yaml --plan             as muster plan says for this machine",
            "muster train --config config.yaml --dry-run          shows what would be started",
            "muster train --resume last                           goes on with the newest run",
            "muster train --resume last --set train.steps=2000    and for longer than it was to",
        ],
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run (its id, its folder, or: last) from its newest good checkpoint",
    )
    job_flags.add_machine_flags(parser)
    job_flags.add_host_flags(job_flags.add_meeting_flags(parser))
    slurm_run.add_flags(parser)
    when = job_flags.add_run_flags(
        parser,
        named="experiment_name",
        usual_restarts=job_flags.USUAL_RESTARTS,
        usual_grace_s=_TO_SAVE_S,
    )
    when.add_argument(
        "--check", action="store_true", help="examine the machines and their links first"
    )
    when.add_argument(
        "--plan",
        action="store_true",
        help="plan for this machine first, train as the plan says, and compare after step 3",
    )
    when.add_argument("--detach", action="store_true", help="go on without this terminal")
    when.add_argument("--dry-run", action="store_true", help="show what would be started, and end")
    when.add_argument("--json", action="store_true", help="with --dry-run: as JSON, for programs")
    parser.set_defaults(run=_run, command=None)


def _run(options: argparse.Namespace) -> int:
    if options.json and not options.dry_run:
        raise Impossible(
            "--json is for --dry-run",
            why="a run shows what its ranks write",
            fix="leave out --json; what was measured is in the run's folder: metrics/steps.jsonl",
        )
    run = resuming.take_run(options) if options.resume else None
    resolved = with_absolute_folder(job_flags.settings_of(options))
    check_trainable(resolved, file=str(options.config or "the settings"))
    if run is not None and resuming.nothing_left(run, resolved):
        return ExitCode.GOOD
    promise = None
    if options.plan:
        from torchmuster.cli.planned_training import follow_plan

        resolved, promise = follow_plan(options, resolved)
    spec = _job(options, resolved)
    if not options.slurm and not spec.hosts:
        check_here(resolved)  # elsewhere, only the ranks can tell what is there
    python = resolved.settings.launch.remote_python or sys.executable
    if options.check and not options.dry_run and not options.slurm:
        code = _check(options, spec, python)
        if code != ExitCode.GOOD:
            return code
    return start(
        options,
        spec,
        python,
        in_folder=functools.partial(_in_folder, resolved=resolved),
        prepare=functools.partial(_save_settings, resolved=resolved, promise=promise),
        run=run,
    )


def _job(options: argparse.Namespace, resolved: Resolved) -> JobSpec:
    """Translate flags and settings into the job whose ranks run the worker."""
    if resolved.sources["experiment_name"].strength is Strength.DEFAULT and not options.name:
        options.name = "train"
    _choose_device(options, resolved)
    if not resolved.settings.distributed.enabled:
        if (options.ranks or 1) > 1 or resolved.settings.launch.hosts:
            raise Impossible(
                "several processes were asked for, but distributed.enabled is false",
                why=f"by {resolved.sources['distributed.enabled'].where}",
                fix="leave out --ranks and the hosts, or --set distributed.enabled=true",
            )
        options.ranks = 1
    words = [WORKER, *as_words(resolved, paths_for_ranks())]
    spec = job_flags.job_from(options, resolved, Script(command=tuple(words), module=True))
    if spec.device == "cpu":
        return dataclasses.replace(spec, command=(*spec.command, "--device", "cpu"))
    if any(name.endswith("_ALLOC_CONF") for name in spec.environment):
        return spec  # people know what they want
    name, value = ALLOCATOR_SETTING
    return dataclasses.replace(spec, environment={**spec.environment, name: value})


def _choose_device(options: argparse.Namespace, resolved: Resolved) -> None:
    """Let ``model.device_map`` decide where no flag does."""
    if options.device != "auto":
        return
    options.device = _DEVICES[resolved.settings.model.device_map]
    asked = resolved.settings.distributed.num_gpus or resolved.settings.distributed.gpu_ids
    if options.device == "cpu" and asked:
        name = "num_gpus" if resolved.settings.distributed.num_gpus else "gpu_ids"
        raise Impossible(
            "model.device_map is cpu, but GPUs were asked for",
            why=f"by {resolved.sources['model.device_map'].where} and by distributed.{name} "
            f"({resolved.sources[f'distributed.{name}'].where})",
            fix="leave out one of the two; --device cpu wins over both",
        )


def _in_folder(spec: JobSpec, folder: Path, *, resolved: Resolved) -> JobSpec:
    words = ("--run-folder", str(folder.resolve()))
    place = checkpoint_place(resolved.settings.checkpoint, folder.resolve())
    return dataclasses.replace(spec, command=(*spec.command, *words), checkpoints=place)


def _save_settings(run: RunFolder, *, resolved: Resolved, promise: "Promise | None") -> None:
    write_atomically(run.config, as_yaml(resolved))
    if promise is not None:
        from torchmuster.plan.proof import comparison

        comparison.write_promise(run.path, promise)


def _check(options: argparse.Namespace, spec: JobSpec, python: str) -> int:
    """Examine the machines and the links between them; nothing is started if something is wrong."""
    from torchmuster.cli import check

    transport = slurm_run.transport_inside(spec) or transport_for(spec, python)
    return check.examine(spec, transport, create(options.runs, "check"), quick=True)
