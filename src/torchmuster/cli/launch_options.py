"""Flags of the commands that launch ranks: devices, hosts, and how a run goes."""

import shlex
from dataclasses import dataclass
from typing import Literal

from torchmuster.cli.options import (
    FOREVER_S,
    RunsOptions,
    ScriptOptions,
    count,
    flag,
    names,
    wait_time,
)
from torchmuster.cli.setting_options import SettingOptions
from torchmuster.launch.job import NodeCounts, parse_nodes
from torchmuster.units import parse_seconds

SHORTEST_LIMIT_S = 10.0


def arguments(text: str) -> tuple[str, ...]:
    """Parse arguments as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {str(error).lower()}") from None


def _some_arguments(text: str) -> tuple[str, ...]:
    parsed = arguments(text)
    if not parsed:
        raise ValueError("no arguments; for example: '--resume_from {path}'")
    return parsed


def _time_limit(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds < SHORTEST_LIMIT_S:
        raise ValueError(f"{text!r} is too short; write at least 10s")
    return seconds


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(SettingOptions):
    """The devices and the environment of the ranks on each host."""

    device: Literal["auto", "gpu", "cpu"] = flag(
        "auto (default): GPUs if there are any, else the CPU",
        default="auto",
        choices=("auto", "gpu", "cpu"),
        group="devices and environment",
    )
    ranks: int | None = flag(
        "processes per host (default: one per GPU, or 1 on the CPU)",
        parse=count,
        metavar="N",
        aliases=("--nproc-per-node", "--nproc_per_node"),
        group="devices and environment",
    )
    share: bool = flag(
        "allow GPUs that are already in use", default=False, group="devices and environment"
    )
    wait: float = flag(
        "wait in line for GPUs in use: without limit, or at most --wait=10m",
        default=0.0,
        parse=wait_time,
        metavar="DURATION",
        alone=FOREVER_S,
        group="devices and environment",
    )
    env: tuple[str, ...] = flag(
        "set a variable on all ranks; NAME alone forwards its current value",
        default=(),
        repeated=True,
        metavar="NAME[=VALUE]",
        group="devices and environment",
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions(DeviceOptions, RunsOptions):
    """The hosts: over ssh or from Slurm."""

    # The arguments after muster, up to the script.
    command_line: tuple[str, ...] = ()

    hosts: tuple[str, ...] | None = flag(
        setting="launch.hosts",
        help="hosts by their ssh names, rank 0's host first: a,b:4,c (4 ranks on b)",
        parse=names,
        metavar="HOSTS",
        group="multiple hosts",
    )
    nodes: NodeCounts | None = flag(
        "number of hosts without spares; 2:4 continues on 2 if others fail",
        parse=parse_nodes,
        metavar="N",
        aliases=("--nnodes",),
        group="multiple hosts",
    )
    slurm: bool = flag(
        "submit this command as a Slurm job",
        default=False,
        group="multiple hosts",
    )
    sbatch: tuple[str, ...] | None = flag(
        "arguments of sbatch: '-p gpu --gpus-per-node=8 --time=12:00:00'",
        parse=arguments,
        metavar="'ARGS'",
        group="multiple hosts",
    )


@dataclass(frozen=True, kw_only=True)
class JoinOptions(HostOptions):
    """Hosts that join with a code."""

    join: bool = flag(
        "print a code with which other machines join (muster join), without ssh; --nodes N counts "
        "this one, too (default: 2)",
        default=False,
        group="multiple hosts",
    )


@dataclass(frozen=True, kw_only=True)
class RunControl(HostOptions):
    """The name and folder of a run, when it restarts, and when it stops."""

    spares: str | None = flag(
        setting="launch.spares",
        help="use the last N hosts as hot spares: they wait, and replace hosts that fail (default: 0)",
        metavar="N",
        group="multiple hosts",
    )
    max_restarts: str | None = flag(
        setting="launch.max_restarts",
        help="restart all ranks after a failure, at most N times without a newer checkpoint",
        metavar="N",
        aliases=("--max_restarts",),
        group="run control",
    )
    time_limit: float | None = flag(
        "save a checkpoint and stop when the ranks have run for DURATION",
        parse=_time_limit,
        metavar="DURATION",
        group="run control",
    )
    webhook: str | None = flag(
        "POST a JSON object to this URL when the run starts, fails and ends (Slack can show it)",
        metavar="URL",
        group="run control",
    )
    name: str | None = flag("name the run (default: the script's name)", group="run control")
    detach: bool = flag("run in the background", default=False, group="run control")
    dry_run: bool = flag("show what would be started, and exit", default=False, group="run control")


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """How a script of the user resumes."""

    resume_with: tuple[str, ...] = flag(
        "on a restart, add ARGS to the script's arguments; {path} is the newest complete checkpoint",
        default=(),
        parse=_some_arguments,
        metavar="ARGS",
        group="run control",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunControl, JoinOptions, ResumeOptions, ScriptOptions):
    """The flags of ``muster run``."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunControl):
    """The flags of ``muster train``."""

    gpu_ids: str | None = flag(
        "use these GPUs: indices or UUIDs, as in 0,2",
        setting="distributed.gpu_ids",
        metavar="ID",
        many=True,
    )
    resume: str | None = flag(
        "resume a run (its id, its folder, or: last) from its newest good checkpoint", metavar="RUN"
    )
