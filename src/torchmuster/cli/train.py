"""``muster train``: train from a settings file, on one or more hosts."""

import dataclasses
from pathlib import Path

from torchmuster.cli import jobs, schedulers
from torchmuster.cli.data_check import check_data, show_data
from torchmuster.cli.launch_options import TrainOptions
from torchmuster.cli.launching import (
    job_and_transport,
    launch,
    run_folder,
    show_dry_run,
)
from torchmuster.cli.options import command
from torchmuster.cli.scripts import Script
from torchmuster.cli.setting_options import settings_of
from torchmuster.config.here import check_here
from torchmuster.config.resolve import Resolved
from torchmuster.config.training import (
    check_trainable,
    checkpoint_place,
    paths_for_ranks,
    with_absolute_folder,
)
from torchmuster.config.written import settings_arguments, settings_yaml
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import write_atomically

WORKER = "torchmuster.worker"
# torch's segments that can grow: less memory is lost between tensors of changing sizes.
ALLOCATOR_SETTING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@command(
    TrainOptions,
    more="""
    Checks the settings, claims the devices, starts a rank on each, and trains; the weights are saved in
    the run folder. To start your own training script, use muster run.
    """,
    examples=[
        "muster train --config config.yaml                    all free GPUs of this machine",
        "muster train --config config.yaml --device cpu --ranks 2    two ranks on the CPU",
        "muster train --config config.yaml --set train.steps=100     override a setting",
        "muster train --config config.yaml --hosts a,b        two hosts over ssh",
        "muster train --resume last                           resume the last training run",
        "muster train --resume last --set train.steps=2000    resume it, and train longer",
    ],
)
def run(options: TrainOptions) -> int:
    """Train and return the exit code."""
    group = schedulers.take_group(options)
    if group is not None:
        code = schedulers.code_of_member(group, options)
        if code is not None:
            return code
    run = None
    if options.resume is not None:
        from torchmuster.cli.resumed_run import take_run

        run, options = take_run(options)
    if group is not None:
        run = group.earlier_run(options.runs)
    resolved = with_absolute_folder(settings_of(options))
    check_trainable(resolved, file=str(options.config or "the settings"))
    if run is not None and run.config.is_file():
        from torchmuster.cli.resumed_run import nothing_left

        if nothing_left(run, resolved):
            return ExitCode.GOOD
    spec = job_of(options, resolved)
    if schedulers.submits(options):
        return schedulers.submit(options, spec)
    is_here = not spec.hosts  # on other hosts, the ranks check
    if is_here:
        check_here(resolved)
    spec, transport = job_and_transport(options, spec, resolved, group)
    if options.dry_run:
        folder = options.runs / "RUN" if run is None else run.path
        return show_dry_run(_in_folder(spec, folder, resolved), transport)
    data = check_data(resolved) if is_here else None
    if data is not None:
        show_data(data)
    if run is None or group is not None:
        run = run_folder(options, spec, group)
    write_atomically(run.config, settings_yaml(resolved))
    return launch(options, _in_folder(spec, run.path, resolved), transport, run, resolved)


def job_of(options: TrainOptions, resolved: Resolved) -> JobSpec:
    """Build the job whose ranks run the worker from flags and settings."""
    if not resolved.settings.distributed.enabled:
        if (options.ranks or 1) > 1 or resolved.settings.launch.hosts:
            raise Impossible(
                "several processes were requested, but distributed.enabled is false",
                why=f"set by {resolved.sources['distributed.enabled'].where}",
                fix="leave out --ranks and the hosts, or --set distributed.enabled=true",
            )
        options = dataclasses.replace(options, ranks=1)
    command = (WORKER, *settings_arguments(resolved, paths_for_ranks()))
    spec = jobs.job_from(
        options,
        resolved,
        Script(command=command, module=True),
        name=jobs.job_name(options.name, resolved, "train"),
        command_line=options.command_line,
        usual_restarts=jobs.USUAL_RESTARTS,
        time_limit_s=options.time_limit,
    )
    if spec.device == "cpu":
        return dataclasses.replace(spec, command=(*spec.command, "--device", "cpu"))
    if any(name.endswith("_ALLOC_CONF") for name in spec.environment):
        return spec  # set by the user
    name, value = ALLOCATOR_SETTING
    return dataclasses.replace(spec, environment={**spec.environment, name: value})


def _in_folder(spec: JobSpec, folder: Path, resolved: Resolved) -> JobSpec:
    arguments = ("--run-folder", str(folder.resolve()))
    place = checkpoint_place(resolved.settings.checkpoint, folder.resolve())
    return dataclasses.replace(spec, command=(*spec.command, *arguments), checkpoints=place)
