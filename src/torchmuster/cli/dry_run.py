"""``muster run --dry-run``: print the commands that would be started, without starting them."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.errors import ExitCode
from torchmuster.launch import protocol
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.launcher.session import environment_of
from torchmuster.launch.network import interfaces
from torchmuster.launch.node import device_lease, ranks
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE
from torchmuster.launch.transports.local import NODE_AGENT
from torchmuster.launch.transports.ssh import is_this_host, node_agent_command
from torchmuster.redaction import redact_command, redact_mapping
from torchmuster.units import plural

# Values that are known only after the hosts have answered are shown as names in capitals. Where the
# code that builds the commands needs a number, an unlikely number is the placeholder.
_RANKS, _WORLD, _PARENT, _FIRST = 999_999_001, 999_999_002, 999_999_003, 999_999_004
_NUMBERS = {_RANKS: "RANKS", _WORLD: "WORLD_SIZE", _PARENT: "NODE_AGENT", _FIRST: "FIRST_RANK"}
_MEANINGS = {
    "ADDRESS": "address of the first host that all other hosts can reach",
    "INTERFACE": "the network interface to the other hosts",
    "PORT": "a port that is free when the run starts",
    "RANKS": "number of ranks on the host: one per GPU",
    "WORLD_SIZE": "total number of ranks on all hosts",
    "FIRST_RANK": "number of the first rank on the host",
    "NODE_AGENT": "process id of the node agent",
    "RUN": "the run's id",
    "RECORDS": "a temporary folder on the host",
    "TOKEN": "token that identifies the processes of the run",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The command and environment that one host would start."""

    host: str
    ranks: int | None  # None: unknown before the host answers
    folder: str
    reasons: tuple[str, ...]
    reached_by: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, object]
    without: tuple[str, ...]  # variables that are removed

    def as_json(self) -> dict[str, object]:
        """Return it as plain JSON types."""
        return {
            "host": self.host,
            "ranks": self.ranks,
            "folder": self.folder,
            "reasons": list(self.reasons),
            "reached_by": list(self.reached_by),
            "command": list(self.command),
            "environment": self.environment,
            "without": list(self.without),
        }


def show(spec: JobSpec, remote_python: str, runs: Path, *, as_json: bool) -> int:
    """Print what ``muster run`` would start with the same flags."""
    machines = _over_ssh(spec, remote_python) if spec.hosts else [_alone(spec, runs)]
    words = _words_in(machines)
    if as_json:
        settled_later = {word: _MEANINGS[word] for word in words}
        plan = {"machines": [one.as_json() for one in machines], "settled_later": settled_later}
        spares = [host.name for host in _spares(spec)]
        output.print_json({**plan, "max_restarts": spec.max_restarts, "spares": spares})
        return ExitCode.GOOD
    for machine in machines:
        _print(machine)
    for host in _spares(spec):
        output.print_text(f"{host.name}: spare; it takes the place of a host that fails")
    if spec.max_restarts:
        times = "once" if spec.max_restarts == 1 else f"up to {spec.max_restarts} times"
        output.print_text(f"after a failure all ranks are restarted, {times}")
    output.print_text("known only when the run starts:")
    for word in words:
        output.print_text(f"  {word:<14} {_MEANINGS[word]}")
    output.print_text("nothing was started or claimed")
    return ExitCode.GOOD


def _print(machine: Machine) -> None:
    told = "one rank per GPU" if machine.ranks is None else plural(machine.ranks, "rank")
    output.print_text(f"{machine.host}: {told}")
    for reason in machine.reasons:
        output.print_text(f"  {reason}")
    output.print_text(f"  node agent:\n    {shlex.join(machine.reached_by)}")
    output.print_text(f"  which starts, in {machine.folder}:")
    output.print_text(f"    {shlex.join(machine.command)}")
    output.print_text("  with these variables (of its first rank):")
    for name, value in machine.environment.items():
        output.print_text(f"    {name}={shlex.quote(str(value))}")
    if machine.without:
        output.print_text(f"  and without these: {', '.join(machine.without)}")


def _words_in(machines: Sequence[Machine]) -> list[str]:
    texts = [
        text for one in machines for text in (*one.command, *map(str, one.environment.values()))
    ]
    return [word for word in _MEANINGS if any(_stands_in(word, text) for text in texts)]


def _stands_in(word: str, text: str) -> bool:
    marked = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text)
    return word in marked.split()


def _alone(spec: JobSpec, runs: Path) -> Machine:
    prepare = _prepare(spec, None)
    held = device_lease.look_at_devices(prepare)
    agent = (sys.executable, *NODE_AGENT)
    return _dry_run_machine(
        spec,
        "this machine",
        prepare,
        held,
        place=0,
        sizes=[held.ranks],
        logs=runs.resolve() / "RUN" / "logs",
        python=sys.executable,
        reached_by=agent,
    )


def _spares(spec: JobSpec) -> tuple[Host, ...]:
    return spec.hosts[len(spec.hosts) - spec.spares :]


def _over_ssh(spec: JobSpec, remote_python: str) -> list[Machine]:
    hosts = spec.hosts[: len(spec.hosts) - spec.spares]
    prepares = [_prepare(spec, host) for host in hosts]
    sizes = [prepare.ranks for prepare in prepares]
    machines = []
    for place, (host, prepare) in enumerate(zip(hosts, prepares, strict=True)):
        held = device_lease.DeviceLease(
            ranks=prepare.ranks or _RANKS,
            devices=(),
            variables={},
            threads=0,
            reasons=("devices and threads are chosen when the host joins",),
        )
        machine = _dry_run_machine(
            spec,
            host.name,
            prepare,
            held,
            place=place,
            sizes=sizes,
            logs=Path("RECORDS", "logs"),
            python=remote_python,
            reached_by=(sys.executable, *NODE_AGENT)
            if is_this_host(host.name)
            else node_agent_command(
                host.name, remote_python, lost_after_s=spec.limits.lost_after_s
            ),
        )
        machines.append(machine)
    return machines


def _prepare(spec: JobSpec, host: Host | None) -> protocol.Prepare:
    ranks = host.ranks if host else None
    return protocol.Prepare(
        run_id="RUN",
        token="TOKEN",  # noqa: S106  # a placeholder
        command=spec.command,
        module=spec.module,
        program=spec.program,
        folder=spec.folder,
        device=spec.device,
        ranks=ranks or spec.ranks or (1 if spec.device == "cpu" else None),
        gpu_ids=spec.gpu_ids,
        share=spec.share,
        environment=environment_of(spec),
        alone=host is None,
        typed=spec.typed,
    )


def _dry_run_machine(
    spec: JobSpec,
    name: str,
    prepare: protocol.Prepare,
    held: device_lease.DeviceLease,
    *,
    place: int,
    sizes: Sequence[int | None],
    logs: Path,
    python: str,
    reached_by: Sequence[str],
) -> Machine:
    share = _dry_run_share(spec, prepare, held, place, sizes, logs)
    added = ranks.host_environment(prepare, {}, held.variables, held.threads)
    if held.threads == 0 and "OMP_NUM_THREADS" not in spec.environment:
        del added["OMP_NUM_THREADS"]  # unknown before the host answers
    if len(sizes) > 1:
        added |= interfaces.socket_variables("INTERFACE", added)
    shown = redact_mapping(added)
    shown[TOKEN_VARIABLE] = "TOKEN"
    for variable, value in ranks.rank_environment(share, 0).items():
        shown[variable] = _in_words(value)
    if spec.port is None:
        shown["MASTER_PORT"] = "PORT"
    return Machine(
        host=name,
        ranks=None if held.ranks == _RANKS else held.ranks,
        folder=spec.folder,
        reasons=held.reasons,
        reached_by=tuple(redact_command(reached_by)),
        command=tuple(
            python if word == sys.executable else _in_words(word)
            for word in redact_command(ranks.rank_command(share, _PARENT))
        ),
        environment=shown,
        without=tuple(
            key for key, value in held.variables.items() if value is None and key in os.environ
        ),
    )


def _dry_run_share(
    spec: JobSpec,
    prepare: protocol.Prepare,
    held: device_lease.DeviceLease,
    place: int,
    sizes: Sequence[int | None],
    logs: Path,
) -> ranks.NodeShare:
    known = [size for size in sizes if size is not None]
    all_known = len(known) == len(sizes)
    address = "127.0.0.1" if len(sizes) == 1 else "ADDRESS"
    first_rank = _FIRST
    if None not in sizes[:place]:
        first_rank = sum(known[:place])
    start = protocol.Start(
        attempt=0,
        node_rank=place,
        nodes=len(sizes),
        first_rank=first_rank,
        world_size=sum(known) if all_known else _WORLD,
        address=address,
        port=spec.port or 0,
        interface=None,
        max_restarts=spec.max_restarts,
    )
    return ranks.NodeShare(
        prepare=prepare,
        start=start,
        ranks=held.ranks,
        logs=logs,
        records=Path("RECORDS"),
    )


def _in_words(text: str) -> str:
    for number, word in _NUMBERS.items():
        text = text.replace(str(number), word)
    return text
