"""``muster run --slurm``: submit a job that runs the same command, and follow it."""

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchmuster.cli import job_flags, output
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural

# Flags of the submission, removed from the command inside the job. Each takes one value.
_VALUES: dict[str, tuple[str, Callable[[str], object], str, str]] = {
    "--nodes": (
        "nodes",
        job_flags.nodes,
        "N",
        "number of nodes without spares (default: 1); with 2:4, the run continues on 2 if others are lost",
    ),
    "--gpus-per-node": ("gpus_per_node", job_flags.count, "N", "GPUs per node"),
    "--cpus-per-node": ("cpus_per_node", job_flags.count, "N", "cores per node"),
    "--partition": ("partition", str, "NAME", "the partition"),
    "--account": ("account", str, "NAME", "the account to charge"),
    "--qos": ("qos", str, "NAME", "the quality of service"),
    "--time": ("time", str, "LIMIT", "the time limit in Slurm's format: 2-12:00:00"),
    "--mem": ("mem", str, "SIZE", "memory per node in Slurm's format: 64G"),
    "--warn": (
        "warn",
        job_flags.warning,
        "DURATION",
        "send SIGUSR1 to the ranks DURATION before the time limit; USR2@5m sends SIGUSR2",
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the Slurm flags."""
    group = parser.add_argument_group("Slurm")
    group.add_argument(
        "--slurm",
        action="store_true",
        help="submit this command as a Slurm job, and follow the job",
    )
    for flag, (name, kind, metavar, text) in _VALUES.items():
        group.add_argument(flag, dest=name, type=kind, metavar=metavar, help=text)
    # These are also flags of the command inside the job.
    group.add_argument(
        "--container-image",
        metavar="IMAGE",
        help="run the ranks in this container (needs Slurm's plugin Pyxis, and torchmuster in the image)",
    )
    group.add_argument(
        "--container-mounts",
        metavar="SRC:DST",
        help="more folders for the container, separated by commas (the job's folder and --runs are mounted anyway)",
    )


def submit_and_follow(options: argparse.Namespace, spec: JobSpec) -> int:
    """Submit the job and show its output; Ctrl-C detaches."""
    from torchmuster.launch.schedulers.slurm import containers
    from torchmuster.launch.schedulers.slurm.follow import LogLine, follow_job, left_running
    from torchmuster.launch.schedulers.slurm.submit import SlurmRequest, render_script, submit_job

    request = SlurmRequest(
        nodes=(options.nodes.most if options.nodes else 1) + spec.spares,
        no_kill=spec.spares > 0
        or (options.nodes is not None and options.nodes.least < options.nodes.most),
        gpus_per_node=options.gpus_per_node,
        cpus_per_node=options.cpus_per_node,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        time=options.time,
        mem=options.mem,
        warn_s=None if options.warn is None else round(options.warn[1]),
        warn_signal="USR1" if options.warn is None else options.warn[0],
    )
    containers.check_plugin(spec)
    script = render_script(spec, request, _inside(options), options.runs)
    if options.dry_run:
        output.print_text(script, end="")
        return ExitCode.GOOD
    job = submit_job(script, run_root=options.runs)
    output.print_text(job)
    output.say(f"muster: submitted as job {job}; to cancel it: scancel {job}")
    if options.detach:
        return ExitCode.GOOD
    try:
        for news in follow_job(job):
            if isinstance(news, LogLine):
                output.print_text(news.text)
            else:
                output.say(f"muster: {news.words}")
                state = news
    except KeyboardInterrupt:
        output.say(f"\nmuster: {left_running(job)}")
        return ExitCode.GOOD
    return ExitCode.GOOD if state.kind == "done" else ExitCode.FAILED


def transport_inside(spec: JobSpec) -> Transport | None:
    """Return the transport to the nodes of the current Slurm job; None outside a job."""
    from torchmuster.launch.schedulers.slurm import allocation, containers

    given = allocation.allocation_here(os.environ)
    if given is None:
        return None
    allocation.check_counts(given, spec)
    containers.check_plugin(spec)
    if warning := allocation.few_cores(given, spec):
        output.show_findings([warning], sys.stderr)
    # The host name of a container may differ from the name of the node.
    if spec.container is None and given.nodes in (
        (socket.gethostname(),),
        (os.environ.get("SLURMD_NODENAME"),),
    ):
        return None  # the job has only this node
    if shutil.which("srun") is None:
        raise Impossible(
            f"Slurm job {given.job} has {plural(len(given.nodes), 'node')}, but srun is not installed here",
            why="Muster starts the ranks on the other nodes with srun; a container has it only if it is mounted",
            fix="mount Slurm's programs, its configuration and munge's socket into the container, or start muster "
            "outside the container, or use one node",
        )
    from torchmuster.launch.transports.srun import SrunTransport

    times = "once" if given.restarts == 1 else f"{given.restarts} times"
    again = f", requeued {times}" if given.restarts else ""
    output.say(f"muster: in Slurm job {given.job} with {len(given.nodes)} nodes{again}")
    return SrunTransport(
        given,
        agent=containers.agent_command(spec.container, spec.folder) if spec.container else None,
        on_event=lambda words: output.say(f"muster: {words}"),
    )


def earlier_run(spec: JobSpec, root: Path) -> RunFolder | None:
    """Return the run to resume: that of a job which Slurm has requeued."""
    from torchmuster.launch.schedulers.slurm import allocation

    run = allocation.earlier_run(spec, root, os.environ)
    if run is not None:
        output.say(f"muster: Slurm has requeued the job: resuming in {run.path}")
    return run


def refuse_flags_without_slurm(options: argparse.Namespace) -> None:
    """Reject Slurm flags without ``--slurm``, and container flags outside a job."""
    if getattr(options, "container_image", None) is not None and "SLURM_JOB_ID" not in os.environ:
        raise Impossible(
            "--container-image works only with Slurm",
            why="Slurm's plugin Pyxis starts the container",
            fix=f"muster {options.words[0]} --slurm --container-image …, or start muster inside a container",
        )
    if options.nodes is not None:
        raise _hosts_unknown(options.words[0], options.nodes)
    for flag, (name, *_) in _VALUES.items():
        if getattr(options, name) is not None:
            raise Impossible(
                f"{flag} works only with Slurm or Kubernetes",
                fix=f"muster {options.words[0]} --slurm {flag} …, or leave {flag} out",
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


def _inside(options: argparse.Namespace) -> list[str]:
    """Return the command line for the job: this one, without the flags of the submission."""
    # After -- any file is a script; a module keeps its -m there.
    script = ["--", *options.command] if options.command else []
    return [sys.executable, "-m", "torchmuster", *_without(options.words), *script]


def _without(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, given = word.partition("=")
        if flag in ("--slurm", "--detach", "--dry-run"):
            continue
        if flag in _VALUES:
            value = given if equals else next(left, "")
            if flag == "--nodes" and ":" in value:  # MIN:MAX also applies inside the job
                kept += [flag, value]
            continue
        kept.append(word)
    return kept
