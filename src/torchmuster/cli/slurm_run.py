"""``muster run --slurm``: submit a job that runs the same command, and follow it."""

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.cli import job_flags, output
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the Slurm flags."""
    group = parser.add_argument_group("Slurm")
    group.add_argument(
        "--slurm",
        action="store_true",
        help="submit this command as a Slurm job, and follow the job",
    )
    group.add_argument(
        "--nodes",
        type=job_flags.nodes,
        metavar="N",
        help="number of nodes without spares (default: 1); with 2:4, the run continues on 2 if others are lost",
    )
    group.add_argument(
        "--sbatch",
        type=_sbatch_arguments,
        metavar="'ARGS'",
        help="arguments of sbatch: '-p gpu --gpus-per-node=8 --cpus-per-task=64 --time=12:00:00'",
    )


def _sbatch_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def submit_and_follow(options: argparse.Namespace, spec: JobSpec) -> int:
    """Submit the job and show its output; Ctrl-C detaches."""
    from torchmuster.launch.schedulers.slurm.jobs import follow_job
    from torchmuster.launch.schedulers.slurm.submit import log_of, render_script, submit_job

    nodes = options.nodes or NodeCounts(least=1, most=1)
    script = render_script(
        spec,
        _command_inside(options),
        options.runs,
        nodes=nodes.most + spec.spares,
        no_kill=spec.spares > 0 or nodes.least < nodes.most,
        sbatch_arguments=options.sbatch or [],
    )
    if options.dry_run:
        if options.json:
            output.print_json({"script": script})
        else:
            output.print_text(script, end="")
        return ExitCode.GOOD
    job = submit_job(script, run_root=options.runs)
    output.print_text(job)
    output.say(f"muster: submitted as job {job}; to cancel it: scancel {job}")
    if options.detach:
        return ExitCode.GOOD
    completed = False
    try:
        for news in follow_job(job, log_of(job, options.runs)):
            if isinstance(news, str):
                output.print_text(news, end="")
            else:
                output.say(f"muster: job {job}: {news.text or 'not known to squeue'}")
                completed = news.completed
    except KeyboardInterrupt:
        output.say(f"\nmuster: job {job} keeps running; to stop it: scancel {job}")
        return ExitCode.GOOD
    return ExitCode.GOOD if completed else ExitCode.FAILED


def transport_inside(spec: JobSpec) -> Transport | None:
    """Return the transport to the nodes of the current Slurm job; None outside a job."""
    from torchmuster.launch.schedulers.slurm import allocation

    here = allocation.allocation_here(os.environ)
    if here is None:
        return None
    allocation.check_counts(here, spec)
    if warning := allocation.few_cores(here, spec):
        output.show_findings([warning], sys.stderr)
    # The host name of a container may differ from the name of the node.
    if here.nodes in ((socket.gethostname(),), (os.environ.get("SLURMD_NODENAME"),)):
        return None  # the job has only this node
    if shutil.which("srun") is None:
        raise Impossible(
            f"Slurm job {here.job} has {plural(len(here.nodes), 'node')}, but srun is not installed here",
            why="Muster starts the ranks on the other nodes with srun; a container has it only if it is mounted",
            fix="mount Slurm's programs, its configuration and munge's socket into the container, or start muster "
            "outside the container, or use one node",
        )
    from torchmuster.launch.transports.srun import SrunTransport

    requeued = ""
    if here.restarts:
        requeued = f", requeued {plural(here.restarts, 'time')}"
    output.say(f"muster: in Slurm job {here.job} with {len(here.nodes)} nodes{requeued}")
    return SrunTransport(here, on_event=lambda words: output.say(f"muster: {words}"))


def earlier_run(spec: JobSpec, root: Path) -> RunFolder | None:
    """Return the run to resume: that of a job which Slurm has requeued."""
    from torchmuster.launch.schedulers.slurm import allocation

    run = allocation.earlier_run(spec, root, os.environ)
    if run is not None:
        output.say(f"muster: Slurm has requeued the job: resuming in {run.path}")
    return run


def refuse_flags_without_slurm(options: argparse.Namespace) -> None:
    """Reject ``--nodes`` without known hosts, and ``--sbatch`` without ``--slurm``."""
    if options.nodes is not None:
        raise _hosts_unknown(options.words[0], options.nodes)
    if options.sbatch is not None:
        raise Impossible(
            "--sbatch works only with --slurm",
            fix=f"muster {options.words[0]} --slurm --sbatch …, or leave --sbatch out",
        )


def _hosts_unknown(command: str, nodes: NodeCounts) -> Impossible:
    join = f", or muster {command} --join --nodes {nodes} … (prints a code for the others)"
    return Impossible(
        f"--nodes {nodes}, but only this host is known",
        why="Muster starts the ranks of all hosts with one command: over ssh, in a Slurm job, or "
        "on hosts that join",
        fix=f"muster {command} --slurm --nodes {nodes} …, or muster {command} --hosts a,b …"
        f"{join if command in ('run', 'check') else ''}",
    )


def for_so_many(options: argparse.Namespace, spec: JobSpec, machines: int) -> JobSpec:
    """Return the job for ``--nodes MIN:MAX``, which must match the known number of hosts."""
    nodes = options.nodes
    if nodes is None or machines < 2:
        return spec
    ranked = machines - spec.spares
    if nodes.most != ranked:
        counted = (
            f"{machines} hosts, {spec.spares} of them spares"
            if spec.spares
            else f"{machines} hosts"
        )
        raise Impossible(
            f"--nodes {nodes}, but there are {counted}",
            why="the maximum is the number of hosts in --hosts or in the Slurm job, without the spares",
            fix=f"--nodes {min(nodes.least, ranked)}:{ranked}",
        )
    options.nodes = None  # handled
    return job_flags.with_nodes(spec, nodes)


def _command_inside(options: argparse.Namespace) -> list[str]:
    """Return the command line for the job: this one, without the flags of the submission."""
    command = [sys.executable, "-m", "torchmuster", *_without_submission(options.words)]
    if options.command:
        # After -- any file is a script; a module keeps its -m there.
        command += ["--", *options.command]
    return command


def _without_submission(words: Sequence[str]) -> list[str]:
    inside: list[str] = []
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag in ("--slurm", "--detach", "--dry-run"):
            continue
        if flag not in ("--nodes", "--sbatch"):
            inside.append(word)
            continue
        if not equals:
            value = next(remaining, "")
        if flag == "--nodes" and ":" in value:  # MIN:MAX also applies inside the job
            inside += [flag, value]
    return inside
