"""``--dry-run``: show what a command would start, on which hosts and devices, without starting it."""

import shlex
import sys
from typing import Any

from torchmuster.cli import output
from torchmuster.config.resolve import Resolved
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.session import environment_of
from torchmuster.launch.node import device_lease
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE
from torchmuster.launch.transports.channel import Transport
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.launch.transports.ssh import SshTransport
from torchmuster.redaction import redact_command, redact_mapping
from torchmuster.units import plural


def show(spec: JobSpec, transport: Transport, resolved: Resolved, *, as_json: bool) -> int:
    """Print what would be started; nothing is started or claimed."""
    if not isinstance(transport, LocalTransport | SshTransport):
        raise Impossible(
            "--dry-run does not work inside a Slurm job",
            why="the nodes' devices and addresses are known only when their node agents answer",
            fix=f"muster {spec.typed[0]} --slurm --dry-run …  # outside a job: shows its script",
        )
    python = sys.executable
    hosts = [_this_host(spec)]
    if spec.hosts:
        python = resolved.settings.launch.remote_python or sys.executable
        hosts = _ssh_hosts(spec)
    command = [python, *(["-m"] if spec.module else []), *spec.command]
    if spec.program:
        command = list(spec.command)
    command = list(redact_command(command))
    environment = redact_mapping(environment_of(spec))
    if as_json:
        plan = {"hosts": hosts, "folder": spec.folder, "command": command}
        limits = {"environment": environment, "max_restarts": spec.max_restarts}
        output.print_json({**plan, **limits})
        return ExitCode.GOOD
    for host in hosts:
        _print_host(host)
    output.print_text(f"each rank runs, in {spec.folder}:\n  {shlex.join(command)}")
    output.print_text("with torchrun's variables (RANK, WORLD_SIZE, …) and these:")
    for name, value in environment.items():
        output.print_text(f"  {name}={shlex.quote(str(value))}")
    if spec.max_restarts:
        output.print_text(
            f"after a failure: all ranks are restarted, at most {plural(spec.max_restarts, 'time')} "
            "without a newer checkpoint"
        )
    output.print_text("nothing was started or claimed")
    return ExitCode.GOOD


def _this_host(spec: JobSpec) -> dict[str, Any]:
    """Return what this host would start, with the devices that it would claim now."""
    prepare = protocol.Prepare(
        run_id="",
        token=TOKEN_VARIABLE,
        command=spec.command,
        module=spec.module,
        program=spec.program,
        folder=spec.folder,
        device=spec.device,
        ranks=spec.ranks or (1 if spec.device == "cpu" else None),
        gpu_ids=spec.gpu_ids,
        share=spec.share,
        environment=environment_of(spec),
        alone=True,
        typed=spec.typed,
    )
    lease = device_lease.look_at_devices(prepare)
    return {
        "host": "this host",
        "ranks": lease.ranks,
        "devices": list(lease.devices),
        "reasons": list(lease.reasons),
        "spare": False,
    }


def _ssh_hosts(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the hosts over ssh; they choose their devices when they join."""
    usual = spec.ranks or (1 if spec.device == "cpu" else None)
    hosts: list[dict[str, Any]] = []
    for position, host in enumerate(spec.hosts):
        is_spare = position >= len(spec.hosts) - spec.spares
        hosts.append(
            {
                "host": host.name,
                "ranks": host.ranks or usual,
                "devices": None,
                "reasons": [],
                "spare": is_spare,
            }
        )
    return hosts


def _print_host(host: dict[str, Any]) -> None:
    ranks = "one rank per GPU" if host["ranks"] is None else plural(host["ranks"], "rank")
    if host["spare"]:
        ranks = "spare; it takes the place of a host that fails"
    output.print_text(f"{host['host']}: {ranks}")
    for line in (*(host["devices"] or ()), *host["reasons"]):
        output.print_text(f"  {line}")
