"""``muster run``: start a torchrun script on one or more hosts, and follow it."""

from pathlib import Path

from torchmuster.cli import jobs, schedulers
from torchmuster.cli.launch_options import RunOptions
from torchmuster.cli.launching import (
    job_and_transport,
    launch,
    run_folder,
    show_dry_run,
)
from torchmuster.cli.options import command
from torchmuster.cli.scripts import script_of
from torchmuster.cli.setting_options import settings_of
from torchmuster.errors import Impossible


@command(
    RunOptions,
    usage="muster run [options] script.py [the script's own arguments]",
    more="""
    A script for torchrun needs no change. Each rank gets its RANK, its log and its devices;
    if a rank fails, all others are stopped and its error is shown. muster run -m package.module
    starts a module.
    """,
    examples=[
        "muster run --num-gpus 2 train.py --lr 1e-4    two free GPUs of this machine, claimed",
        "muster run --device cpu --ranks 2 train.py    two ranks on the CPU",
        "muster run --hosts a,b:4,c train.py           three hosts over ssh",
        "muster run --join train.py                    this machine, and one that joins with a code",
        "muster run --slurm --nodes 2 --sbatch '--gpus-per-node=8' train.py    as a Slurm job",
        "muster run torchrun --nproc-per-node 2 train.py    a pasted torchrun command",
    ],
)
def run(options: RunOptions) -> int:
    """Start the script and return its exit code."""
    if options.script and not options.script[0].endswith(".py"):
        from torchmuster.cli.torchrun import translated

        options = translated(options)
    _check(options)
    group = schedulers.take_group(options)
    if group is not None:
        code = schedulers.code_of_member(group, options)
        if code is not None:
            return code
    script = script_of(options.script, Path.cwd())
    resolved = settings_of(options)
    spec = jobs.job_from(
        options,
        resolved,
        script,
        name=jobs.job_name(options.name, resolved, script.name),
        command_line=options.command_line,
        resume_with=options.resume_with,
        time_limit_s=options.time_limit,
    )
    if schedulers.submits(options):
        return schedulers.submit(options, spec, options.script)
    spec, transport = job_and_transport(options, spec, resolved, group)
    if options.dry_run:
        return show_dry_run(spec, transport)
    folder = run_folder(options, spec, group)
    return launch(options, spec, transport, folder, resolved)


def _check(options: RunOptions) -> None:
    for name, is_given in (
        ("slurm", options.slurm),
        ("detach", options.detach),
        ("dry-run", options.dry_run),
    ):
        if options.join and is_given:
            raise Impossible(f"--join does not work with --{name}", fix=f"leave out --{name}")
