"""Flags that describe a job, for every command that launches one, and their conversion to a job."""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmuster.cli import output
from torchmuster.cli.config import add_setting_flags, settings_from
from torchmuster.cli.scripts import Script
from torchmuster.config.layers import Flag, Strength
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, Limits, NodeCounts, parse_hosts, parse_nodes
from torchmuster.runfolder import DEFAULT_ROOT, RunFolder
from torchmuster.units import parse_seconds

# Heartbeats are sent every 2 s; fewer than two missing ones are not significant.
_SHORTEST_SILENCE_S = 5.0
_SHORTEST_LIMIT_S = 10.0
# --wait without a duration: 10 years, because infinity cannot be sent.
FOREVER_S = 10 * 365 * 86400.0
# Restarts of runs that resume from a checkpoint, if --max-restarts is not given.
USUAL_RESTARTS = 3
# Variables that configure libraries are forwarded; all others stay on their host.
_LIBRARY_VARIABLES = (
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


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the devices and the environment of each host."""
    add_setting_flags(parser)
    give = parser.add_argument_group("devices and environment")
    give.add_argument(
        "--device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto (default): GPUs if there are any, else the CPU",
    )
    give.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="processes per host (default: one per GPU, or 1 on the CPU)",
    )
    give.add_argument("--share", action="store_true", help="allow GPUs that are already in use")
    give.add_argument(
        "--wait",
        nargs="?",
        type=wait_time,
        const=FOREVER_S,
        default=0.0,
        metavar="DURATION",
        help="if GPUs are in use, wait in line for them: without limit, or for at most DURATION, such as 10m",
    )
    give.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable on all ranks; NAME alone forwards its current value",
    )


def add_rendezvous_flags(parser: argparse.ArgumentParser) -> Any:
    """Add the flags for the rendezvous of a run's hosts."""
    many = parser.add_argument_group("multiple hosts")
    many.add_argument(
        "--address", metavar="ADDR", help="rendezvous address or interface of the first host"
    )
    many.add_argument(
        "--port",
        type=port,
        metavar="N",
        help="rendezvous port (default: 29400 or the next free one)",
    )
    many.add_argument(
        "--join-timeout",
        type=duration,
        default=120.0,
        metavar="DURATION",
        help="fail if not all hosts have joined after DURATION (default: 2m, or 30m with --join)",
    )
    many.add_argument(
        "--lost-after",
        type=_silence,
        default=10.0,
        metavar="DURATION",
        help="declare a host lost after DURATION without a heartbeat (default: 10s)",
    )
    return many


def add_host_flags(many: Any) -> None:
    """Add the flags for hosts that are reached over ssh."""
    many.add_argument(
        "--hosts",
        nargs="+",
        metavar="HOST",
        help="hosts by their ssh names, rank 0's host first: a,b:4,c (4 ranks on b)",
    )
    many.add_argument(
        "--remote-python",
        metavar="PATH",
        help="Python on the other hosts (default: the same path as here)",
    )


def add_spares_flag(many: Any) -> None:
    """Add the flag for hot spares."""
    many.add_argument(
        "--spares",
        metavar="N",
        help="use the last N hosts as hot spares: they wait, and replace hosts that fail (default: 0). Spares are used "
        "first; with --nodes MIN:MAX, the run then continues with fewer hosts",
    )


def add_run_flags(
    parser: argparse.ArgumentParser,
    *,
    named: str = "the script's name",
    usual_restarts: int = 0,
) -> Any:
    """Add the flags for restarts, shutdown, hangs, and the run's name and folder."""
    parser.set_defaults(usual_restarts=usual_restarts)
    when = parser.add_argument_group("run control")
    when.add_argument(
        "--max-restarts",
        "--restarts",
        metavar="N",
        help="restart all ranks after a failure, at most N times without a newer checkpoint "
        f"(default: {usual_restarts})",
    )
    when.add_argument(
        "--grace",
        type=duration,
        metavar="DURATION",
        help=f"kill ranks that have not exited DURATION after SIGTERM (default: {Limits.grace_s:.0f}s, or less if Slurm or "
        "Kubernetes kills them earlier)",
    )
    when.add_argument(
        "--end-hangs-after",
        type=_patience,
        metavar="DURATION",
        help="kill ranks that hang for DURATION, or: never (default: 1m if they cannot recover)",
    )
    when.add_argument("--name", help=f"name the run (default: {named})")
    when.add_argument(
        "--runs",
        type=Path,
        default=DEFAULT_ROOT,
        metavar="DIR",
        help="folder for the run folders (default: runs)",
    )
    return when


def add_resume_flag(when: Any) -> None:
    """Add the flag for scripts that resume in their own way."""
    when.add_argument(
        "--resume-with",
        type=_shell_words,
        default=(),
        metavar="ARGS",
        help="on a restart, add ARGS to the script's arguments; {path} is the newest complete checkpoint",
    )


def add_unattended_flags(when: Any) -> None:
    """Add the flags for runs that nobody watches: a time limit, and a webhook."""
    when.add_argument(
        "--time-limit",
        type=_time_limit,
        metavar="DURATION",
        help="save a checkpoint and stop when the ranks have run for DURATION",
    )
    when.add_argument(
        "--webhook",
        metavar="URL",
        help="POST a JSON object to this URL when the run starts, fails and ends (Slack can show it)",
    )


def settings_of(options: argparse.Namespace) -> Resolved:
    """Resolve the settings, including the launch flags."""
    for name, path in (
        ("hosts", "launch.hosts"),
        ("max_restarts", "launch.max_restarts"),
        ("remote_python", "launch.remote_python"),
        ("spares", "launch.spares"),
    ):
        given = getattr(options, name, None)
        if given is not None:
            # As JSON, which is valid YAML: YAML would parse an address in brackets as a list.
            text = json.dumps(_items(given)) if isinstance(given, list) else given
            flag = f"--{name.replace('_', '-')}"
            options.set.append(Flag(flag=flag, path=path, text=text))
    return settings_from(options)


def _items(words: list[str]) -> list[str]:
    """Split ``a b`` and ``a,b`` into items."""
    return [item.strip() for word in words for item in word.split(",") if item.strip()]


def job_from(options: argparse.Namespace, resolved: Resolved, script: Script) -> JobSpec:
    """Build a job from flags and settings."""
    settings = resolved.settings
    ids = settings.distributed.gpu_ids
    hosts = parse_hosts(settings.launch.hosts) if settings.launch.hosts else ()
    return JobSpec(
        name=_job_flags_name(options, resolved, script),
        command=script.command,
        module=script.module,
        program=script.program,
        typed=_typed(options),
        flags=tuple(options.words[1:]),
        folder=str(Path.cwd()),
        device=_job_flags_device(options, resolved),
        ranks=_job_flags_ranks(options, resolved),
        gpu_ids=None if ids is None else tuple(map(str, ids)),
        share=options.share,
        wait_s=options.wait,
        hosts=hosts,
        port=options.port or settings.distributed.master_port,
        address=options.address,
        max_restarts=_job_flags_restarts(options, resolved),
        spares=settings.launch.spares if hasattr(options, "spares") else 0,
        resume_with=getattr(options, "resume_with", ()),  # muster train has no such flag
        environment=_environment(options.env),
        limits=Limits(
            join_s=options.join_timeout,
            lost_after_s=options.lost_after,
            grace_s=Limits.grace_s if options.grace is None else options.grace,
            end_hangs_s=getattr(options, "end_hangs_after", None),  # muster check has no such flag
            time_s=getattr(options, "time_limit", None),
        ),
    )


def with_nodes(spec: JobSpec, nodes: NodeCounts) -> JobSpec:
    """Return the job for these node counts; a job that may continue with fewer needs restarts."""
    if nodes.least == nodes.most:
        return spec
    restarts = spec.max_restarts or USUAL_RESTARTS
    return replace(spec, min_nodes=nodes.least, max_restarts=restarts)


def with_spares(spec: JobSpec, machines: int) -> JobSpec:
    """Return the job if so many hosts are enough for its spares; a spare needs restarts to take over."""
    if not spec.spares:
        return spec
    if machines <= spec.spares:
        known = "only this host is known" if machines < 2 else f"there are {machines} hosts"
        raise Impossible(
            f"--spares {spec.spares}, but {known}",
            why="spares are the last hosts of --hosts or of the Slurm job; at least one other host must run ranks",
            fix=f"list {spec.spares + 1} or more hosts: --hosts a,b,…, or use fewer spares",
        )
    return replace(spec, max_restarts=spec.max_restarts or USUAL_RESTARTS)


def console_for(run: RunFolder) -> "Any":
    """Return the console of a command that launches a run."""
    from torchmuster.launch.launcher.console import TerminalConsole

    return TerminalConsole(
        run,
        colour=output.wants_colour(sys.stdout),
        own_colour=output.wants_colour(sys.stderr),
        width=shutil.get_terminal_size().columns,
    )


def _job_flags_restarts(options: argparse.Namespace, resolved: Resolved) -> int:
    given = resolved.settings.launch.max_restarts
    usual = getattr(options, "usual_restarts", 0)  # muster check has no such flags
    return int(usual) if given is None else given


def _job_flags_name(options: argparse.Namespace, resolved: Resolved, script: Script) -> str:
    source = resolved.sources["experiment_name"]
    if options.name:
        return str(options.name)
    given = source.strength is not Strength.DEFAULT
    return resolved.settings.experiment_name if given else script.name


def _job_flags_device(options: argparse.Namespace, resolved: Resolved) -> Any:
    """Return the device type; a number of GPUs or GPU ids imply GPUs."""
    asked = resolved.settings.distributed.num_gpus or resolved.settings.distributed.gpu_ids
    if options.device != "cpu":
        return "gpu" if asked else options.device
    sources = [resolved.sources[f"distributed.{name}"] for name in ("num_gpus", "gpu_ids")]
    if any(source.strength is Strength.FLAG for source in sources):
        raise Impossible(
            "--device cpu uses no GPUs, but GPUs were requested",
            why=f"requested by {next(one.where for one in sources if one.strength is Strength.FLAG)}",
            fix="leave out one of the two; set the number of CPU processes with --ranks 2",
        )
    return "cpu"


def _job_flags_ranks(options: argparse.Namespace, resolved: Resolved) -> int | None:
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
    return int(options.ranks)


def _typed(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments to rerun the command with: its name and its settings file."""
    config = getattr(options, "config", None)
    return (options.words[0], *(("--config", str(config)) if config else ()))


def _environment(names: list[str]) -> dict[str, str]:
    """Return the variables of the ranks."""
    chosen = {
        name: value for name, value in os.environ.items() if name.startswith(_LIBRARY_VARIABLES)
    }
    return chosen | named_variables(names)


def named_variables(words: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``, and ``NAME`` for a variable that is set here."""
    chosen = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise Impossible(
                f"cannot forward --env {name}: the variable is not set here",
                fix=f"export {name} first, or give its value: --env {name}=VALUE",
            )
        chosen[name] = value if equals else os.environ[name]
    return chosen


def sees_gpus() -> bool:
    """Return whether this process sees GPUs of this host."""
    from torchmuster.devices import snapshot
    from torchmuster.devices.visibility import visible

    return bool(visible(snapshot.take_snapshot().accelerators, os.environ).devices)


def count(text: str) -> int:
    """Parse a number of processes."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 4096")
    return number


def nodes(text: str) -> NodeCounts:
    """Parse a number of hosts, or minimum and maximum: 2:4."""
    try:
        return parse_nodes(text)
    except Impossible as error:
        raise argparse.ArgumentTypeError(error.what) from None


def duration(text: str) -> float:
    """Parse a duration such as 10s, 5m or 2h."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def wait_time(text: str) -> float:
    """Parse how long to wait: a duration, or forever."""
    return FOREVER_S if text == "forever" else duration(text)


def _time_limit(text: str) -> float:
    seconds = duration(text)
    if seconds < _SHORTEST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is too short; write at least 10s")
    return seconds


def _shell_words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).lower()}") from None
    if not words:
        raise argparse.ArgumentTypeError("no arguments; for example: '--resume_from {path}'")
    return words


def _silence(text: str) -> float:
    seconds = duration(text)
    if seconds < _SHORTEST_SILENCE_S:
        shortest = f"{_SHORTEST_SILENCE_S:.0f}s"
        raise argparse.ArgumentTypeError(f"{text!r} is too short: the minimum is {shortest}")
    return seconds


def _patience(text: str) -> float:
    return math.inf if text == "never" else duration(text)


def port(text: str) -> int:
    """Parse a port number."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 1 to 65535")
    return number
