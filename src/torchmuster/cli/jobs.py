"""From flags and settings to the job that the launcher starts."""

import dataclasses
import math
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.launch_options import DeviceOptions, HostOptions
from torchmuster.cli.scripts import Script
from torchmuster.config.layers import Strength
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.launch.job import Device, JobSpec, Limits, NodeCounts, parse_hosts
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import parse_seconds

if TYPE_CHECKING:
    from torchmuster.launch.launcher.console import TerminalConsole

# Restarts of runs that resume from a checkpoint, if --max-restarts is not given.
USUAL_RESTARTS = 3
USUAL_JOIN_S = 120.0
# Where people or schedulers start the hosts.
PATIENT_JOIN_S = 1800.0
# Heartbeats are sent every 2 s; fewer than two missing ones are not significant.
SHORTEST_SILENCE_S = 5.0
# Settings of launch -> fields of Limits.
_LIMITS = {"join_timeout": "join_s", "grace": "grace_s", "end_hangs_after": "end_hangs_s"}
# Variables that configure libraries are forwarded; all others stay on their host.
LIBRARY_VARIABLES = (
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "FI_",  # libfabric, for example for AWS EFA
    "UCX_",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_DISTRIBUTED_",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


def job_from(
    options: HostOptions,
    resolved: Resolved,
    script: Script,
    *,
    name: str,
    command_line: tuple[str, ...],
    usual_restarts: int = 0,
    resume_with: tuple[str, ...] = (),
    time_limit_s: float | None = None,
) -> JobSpec:
    """Build a job from flags and settings; ``command_line`` is what was typed up to the script."""
    settings = resolved.settings
    ids = settings.distributed.gpu_ids
    restarts = settings.launch.max_restarts
    typed: tuple[str, ...] = (command_line[0],)
    if options.config is not None:
        typed = (command_line[0], "--config", str(options.config))
    return JobSpec(
        name=name,
        command=script.command,
        module=script.module,
        program=script.program,
        typed=typed,
        flags=command_line[1:],
        folder=str(Path.cwd()),
        device=device_of(options, resolved),
        ranks=_ranks(options, resolved),
        gpu_ids=None if ids is None else tuple(map(str, ids)),
        share=options.share,
        wait_s=options.wait,
        hosts=parse_hosts(settings.launch.hosts or ()),
        port=settings.distributed.master_port,
        address=settings.launch.address,
        max_restarts=usual_restarts if restarts is None else restarts,
        spares=settings.launch.spares,
        resume_with=resume_with,
        environment=environment_of(options),
        limits=limits_of(resolved, time_limit_s),
    )


def limits_of(resolved: Resolved, time_limit_s: float | None = None) -> Limits:
    """Return the time limits that the settings give."""
    launch = resolved.settings.launch
    lost_after_s = seconds(launch.lost_after)
    if lost_after_s < SHORTEST_SILENCE_S:
        raise Impossible(
            f"launch.lost_after {launch.lost_after} is too short",
            why=f"hosts send a heartbeat every 2 s; the minimum is {SHORTEST_SILENCE_S:.0f}s",
            fix="--set launch.lost_after=10s",
        )
    limits = Limits(lost_after_s=lost_after_s, join_s=USUAL_JOIN_S, time_s=time_limit_s)
    for name, limit in _LIMITS.items():
        value = getattr(launch, name)
        if value is not None:
            limits = dataclasses.replace(limits, **{limit: seconds(value)})
    return limits


def patient(spec: JobSpec, resolved: Resolved) -> JobSpec:
    """Return the job whose hosts are started by people or by a scheduler."""
    if resolved.settings.launch.join_timeout is not None:
        return spec
    return dataclasses.replace(spec, limits=dataclasses.replace(spec.limits, join_s=PATIENT_JOIN_S))


def seconds(value: float | str) -> float:
    """Return the seconds of a setting that is a duration."""
    if value == "never":
        return math.inf
    try:
        return parse_seconds(str(value))
    except ValueError as error:
        raise Impossible(str(error), fix="--set launch.grace=60s") from None


def job_name(given: str | None, resolved: Resolved, usual: str) -> str:
    """Return the name of a run: the flag, else the setting if it is given, else the usual name."""
    if given:
        return given
    if resolved.sources["experiment_name"].strength is Strength.DEFAULT:
        return usual
    return resolved.settings.experiment_name


def with_host_counts(spec: JobSpec, nodes: NodeCounts | None, hosts: int) -> JobSpec:
    """Return the job for this number of known hosts, after checking ``--nodes`` and the spares."""
    if spec.spares and hosts <= spec.spares:
        known = "only this host is known" if hosts < 2 else f"there are {hosts} hosts"
        raise Impossible(
            f"--spares {spec.spares}, but {known}",
            why="spares are the last hosts of --hosts or of the Slurm job; at least one other host must run ranks",
            fix=f"list {spec.spares + 1} or more hosts: --hosts a,b,…, or use fewer spares",
        )
    if nodes is not None and hosts < 2:
        command = spec.typed[0]
        join = f", or muster {command} --join --nodes {nodes} …" if command != "train" else ""
        raise Impossible(
            f"--nodes {nodes}, but only this host is known",
            why="Muster starts the ranks of all hosts with one command: over ssh, in a Slurm job, or "
            "on hosts that join",
            fix=f"muster {command} --slurm --nodes {nodes} …, or muster {command} --hosts a,b …{join}",
        )
    if nodes is not None:
        spec = _for_counts(spec, nodes, hosts)
    if spec.spares:
        return dataclasses.replace(spec, max_restarts=spec.max_restarts or USUAL_RESTARTS)
    return spec


def _for_counts(spec: JobSpec, nodes: NodeCounts, hosts: int) -> JobSpec:
    with_ranks = hosts - spec.spares
    if nodes.most != with_ranks:
        spares = f", {spec.spares} of them spares" if spec.spares else ""
        raise Impossible(
            f"--nodes {nodes}, but there are {hosts} hosts{spares}",
            why="the maximum is the number of hosts in --hosts or in the Slurm job, without the spares",
            fix=f"--nodes {min(nodes.least, with_ranks)}:{with_ranks}",
        )
    if nodes.least == nodes.most:
        return spec
    # A job that may continue with fewer hosts needs restarts.
    restarts = spec.max_restarts or USUAL_RESTARTS
    return dataclasses.replace(spec, min_nodes=nodes.least, max_restarts=restarts)


def transport_for(spec: JobSpec, python: str) -> Transport:
    """Return the transport to the hosts of a job: ssh, or this host only."""
    if spec.hosts:
        from torchmuster.launch.transports.ssh import SshTransport

        return SshTransport(spec.hosts, python)
    from torchmuster.launch.transports.local import LocalTransport

    return LocalTransport(socket.gethostname())


def console_for(run: RunFolder) -> "TerminalConsole":
    """Return the console of a command that launches a run."""
    from torchmuster.launch.launcher.console import TerminalConsole

    return TerminalConsole(
        run,
        colour=output.wants_colour(sys.stdout),
        own_colour=output.wants_colour(sys.stderr),
        width=shutil.get_terminal_size().columns,
    )


def device_of(options: DeviceOptions, resolved: Resolved) -> Device:
    """Return the device type; a number of GPUs or GPU ids imply GPUs."""
    distributed = resolved.settings.distributed
    if options.device != "cpu":
        return "gpu" if distributed.num_gpus or distributed.gpu_ids else options.device
    for name in ("num_gpus", "gpu_ids"):
        source = resolved.sources[f"distributed.{name}"]
        if source.strength is Strength.FLAG:
            raise Impossible(
                "--device cpu uses no GPUs, but GPUs were requested",
                why=f"requested by {source.where}",
                fix="leave out one of the two; set the number of CPU processes with --ranks 2",
            )
    return "cpu"


def _ranks(options: DeviceOptions, resolved: Resolved) -> int | None:
    """Return the number of processes on each host; with GPUs, one for each."""
    gpus = resolved.settings.distributed.num_gpus
    if options.ranks is None:
        return None if options.device == "cpu" else gpus
    if options.device != "cpu" and gpus is not None and gpus != options.ranks:
        source = resolved.sources["distributed.num_gpus"].where
        raise Impossible(
            f"--ranks {options.ranks} and {gpus} GPUs ({source}) contradict each other",
            why="each GPU gets one rank",
            fix="give one of the two",
        )
    return options.ranks


def environment_of(options: DeviceOptions) -> dict[str, str]:
    """Return the variables of the ranks: those of libraries that are set here, and ``--env``."""
    variables = {}
    for name, value in os.environ.items():
        if name.startswith(LIBRARY_VARIABLES):
            variables[name] = value
    return variables | named_variables(options.env)


def named_variables(assignments: tuple[str, ...]) -> dict[str, str]:
    """Parse ``NAME=VALUE``, and ``NAME`` for a variable that is set here."""
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals and name not in os.environ:
            raise Impossible(
                f"cannot forward --env {name}: the variable is not set here",
                fix=f"export {name} first, or give its value: --env {name}=VALUE",
            )
        variables[name] = value if equals else os.environ[name]
    return variables


def sees_gpus() -> bool:
    """Return whether this process sees GPUs of this host."""
    from torchmuster.devices import snapshot
    from torchmuster.devices.visibility import visible

    return bool(visible(snapshot.take_snapshot().accelerators, os.environ).devices)
