"""Launching a job from a command, and staying with it."""

import argparse
import socket
from collections.abc import Callable
from pathlib import Path

from torchmuster.cli import job_flags, slurm_run
from torchmuster.cli.reporting import with_report
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder, create

InFolder = Callable[[JobSpec, Path], JobSpec]


def start(
    options: argparse.Namespace,
    spec: JobSpec,
    python: str,
    *,
    in_folder: InFolder = lambda spec, _: spec,
    prepare: Callable[[RunFolder], None] = lambda _: None,
    run: RunFolder | None = None,
) -> int:
    """Do with a job what the flags say: show it, submit it, leave it alone, or stay with it.

    ``in_folder`` gives the job what it must know of its run's folder, ``prepare`` what the folder is
    to hold from the beginning. A ``run`` that is given goes on in its folder.
    """
    if options.slurm:
        return slurm_run.submit_and_follow(options, spec)
    transport = slurm_run.transport_inside(spec)
    machines = len(transport.places) if transport is not None else len(spec.hosts)
    spec = slurm_run.for_so_many(options, spec, machines)
    slurm_run.refuse_flags_without_slurm(options)
    if options.dry_run and transport is None:
        from torchmuster.cli import dry_run

        spec = in_folder(spec, run.path if run is not None else options.runs / "RUN")
        return dry_run.show(spec, python, options.runs, as_json=options.json)
    if options.dry_run:
        raise Impossible(
            "--dry-run shows nothing useful inside a Slurm job",
            why="which devices and addresses the nodes have is known when their keepers answer",
            fix=f"muster {options.words[0]} --slurm --dry-run …  # outside of the job shows its script",
        )
    transport = transport or transport_for(spec, python)
    run = slurm_run.earlier_run(spec, options.runs) or run or create(options.runs, spec.name)
    prepare(run)
    spec = in_folder(spec, run.path)
    if options.detach:
        from torchmuster.cli import detaching

        return detaching.detach(run, lambda: _stay_to_the_end(spec, transport, run))
    return _stay_to_the_end(spec, transport, run)


def _stay_to_the_end(spec: JobSpec, transport: Transport, run: RunFolder) -> int:
    return with_report(run, lambda: stay(spec, transport, run))


def stay(spec: JobSpec, transport: Transport, run: RunFolder) -> int:
    """Launch a job and show how it goes until it is over."""
    from torchmuster.launch.launcher.launch_job import launch

    return launch(spec, transport, run, job_flags.voice_for)


def transport_for(spec: JobSpec, python: str) -> Transport:
    """Return the way to the machines of a job: ssh, or none but this one."""
    if spec.hosts:
        from torchmuster.launch.transports.ssh import SshTransport

        return SshTransport(spec.hosts, python, lost_after_s=spec.limits.lost_after_s)
    from torchmuster.launch.transports.local import LocalTransport

    return LocalTransport(socket.gethostname())
