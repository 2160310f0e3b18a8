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
from torchmuster.units import parse_seconds, plural

if TYPE_CHECKING:
    from torchmuster.launch.launcher.console import TerminalConsole

# Restarts of runs that resume from a checkpoint, if --max-restarts is not given.
USUAL_RESTARTS = 3
USUAL_JOIN_S = 120.0
# Where people or schedulers start the hosts.
PATIENT_JOIN_S = 1800.0
# Heartbeats are sent every 2 s; fewer than two missing ones are not significant.
SHORTEST_SILENCE_S = 5.0
# Values of model.device_map
DEVICE_MAPS: dict[str, Device] = {"auto": "auto", "cuda": "gpu", "cpu": "cpu"}
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
    device, ranks = device_and_ranks(options, resolved)
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
        device=device,
        ranks=ranks,
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
    """Return the time limits that the settings give, in seconds."""
    launch = resolved.settings.launch
    limits = Limits(
        lost_after_s=seconds(launch.lost_after),
        join_s=USUAL_JOIN_S if launch.join_timeout is None else seconds(launch.join_timeout),
        end_hangs_s=None if launch.end_hangs_after is None else seconds(launch.end_hangs_after),
        time_s=time_limit_s,
    )
    if limits.lost_after_s < SHORTEST_SILENCE_S:
        raise Impossible(
            f"launch.lost_after {launch.lost_after} is too short",
            why=f"hosts send a heartbeat every 2 s; the minimum is {SHORTEST_SILENCE_S:.0f}s",
            fix="--set launch.lost_after=10s",
        )
    if launch.grace is None:
        return limits
    return dataclasses.replace(limits, grace_s=seconds(launch.grace))


def seconds(value: float | str) -> float:
    """Return the seconds of a setting that is a duration; "never" is infinity."""
    if value == "never":
        return math.inf
    try:
        return parse_seconds(str(value))
    except ValueError as error:
        raise Impossible(str(error), fix="--set launch.grace=60s") from None


def patient(spec: JobSpec, resolved: Resolved) -> JobSpec:
    """Return the job whose hosts are started by people or by a scheduler."""
    if resolved.settings.launch.join_timeout is not None:
        return spec
    return dataclasses.replace(spec, limits=dataclasses.replace(spec.limits, join_s=PATIENT_JOIN_S))


def job_name(given: str | None, resolved: Resolved, usual: str) -> str:
    """Return the name of a run: the flag, else the setting if it is given, else the usual name."""
    if given:
        return given
    if resolved.sources["experiment_name"].strength is Strength.DEFAULT:
        return usual
    return resolved.settings.experiment_name


def with_host_counts(spec: JobSpec, nodes: NodeCounts | None, hosts: int) -> JobSpec:
    """Return the job for this number of hosts, after checking that ``--nodes`` and the spares fit it.

    The last hosts are the spares. A job with spares, or that may continue with fewer hosts, needs restarts.
    """
    with_ranks = hosts - spec.spares
    if with_ranks < 1 or (nodes is not None and nodes.most != with_ranks):
        wanted = spec.spares + (1 if nodes is None else nodes.most)
        fix = f"name {wanted} hosts: --hosts a,b,…, or as a Slurm job: --slurm --nodes N"
        if spec.typed[0] != "train":
            fix += ", or hosts that join: --join --nodes N"
        if nodes is not None and with_ranks > 1:
            fix = f"--nodes {min(nodes.least, with_ranks)}:{with_ranks}, or {fix}"
        raise Impossible(
            f"{plural(wanted, 'host')} wanted, {hosts} known",
            why="Muster starts the ranks of all hosts with one command; --nodes counts those that run ranks, "
            "--spares those that wait",
            fix=fix,
        )
    least = None if nodes is None or nodes.least == nodes.most else nodes.least
    if not spec.spares and least is None:
        return spec
    restarts = spec.max_restarts or USUAL_RESTARTS
    return dataclasses.replace(spec, min_nodes=least or spec.min_nodes, max_restarts=restarts)


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


def device_and_ranks(options: DeviceOptions, resolved: Resolved) -> tuple[Device, int | None]:
    """Return the device type, and the processes per host (None: one for each GPU).

    A flag overrides a setting: ``--device cpu`` trains on the CPU whatever a file says about GPUs. A number of
    GPUs or GPU ids imply GPUs.
    """
    distributed = resolved.settings.distributed
    device: Device = options.device
    weakest = Strength.FLAG
    source = "--device"
    if device == "auto":
        device = DEVICE_MAPS[resolved.settings.model.device_map]
        weakest = Strength.DEFAULT
        source = f"model.device_map ({resolved.sources['model.device_map'].where})"
    requested = []
    for name in ("num_gpus", "gpu_ids"):
        origin = resolved.sources[f"distributed.{name}"]
        if getattr(distributed, name) and origin.strength >= weakest:
            requested.append(origin.where)
    if device == "cpu":
        if requested:
            raise Impossible(
                "the CPU and GPUs were both requested",
                why=f"the CPU by {source}, GPUs by {requested[0]}",
                fix="leave out one of the two; set the number of CPU processes with --ranks 2",
            )
        return "cpu", options.ranks
    gpus = distributed.num_gpus
    if options.ranks is not None and gpus is not None and gpus != options.ranks:
        where = resolved.sources["distributed.num_gpus"].where
        raise Impossible(
            f"--ranks {options.ranks} and {gpus} GPUs ({where}) contradict each other",
            why="each GPU gets one rank",
            fix="give one of the two",
        )
    if gpus or distributed.gpu_ids:
        device = "gpu"
    return device, options.ranks or gpus


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
