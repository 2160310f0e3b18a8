"""The flags of torchrun, and what ``muster run`` does with each: one table, also for the docs."""

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchmuster.cli.job_flags import sees_gpus
from torchmuster.errors import Impossible

Given = Mapping[str, str]  # flags by name, with hyphens; a switch has the value ""
_CHOSEN = "no effect: Muster finds a free port, and an address that all hosts can reach"
_OWN_RENDEZVOUS = "no effect: the hosts meet at the launcher, so no rendezvous service is needed"
_LOGS = "no effect: all output is on the console and in logs/rank-N.log of the run folder"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a flag becomes: flags of muster, or a note on why it has no effect, or neither."""

    words: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class TorchrunFlag:
    """A flag of torchrun: its value in the help (none: a switch), and its effect in ``muster run``."""

    name: str
    short: str = ""
    value: str = ""
    does: str
    apply: Callable[[str, Given], Outcome]

    @property
    def variable(self) -> str:
        """The variable from which torchrun takes the flag's default."""
        return f"PET_{self.name[2:].replace('-', '_').upper()}"


def _several_hosts(given: Given) -> bool:
    return given.get("--nnodes", "1") not in ("1", "1:1")


def _nodes(value: str, given: Given) -> Outcome:
    return Outcome(words=("--nodes", value) if _several_hosts(given) else ())


def _ranks(value: str, _: Given) -> Outcome:
    if value.isdecimal():
        return Outcome(words=("--ranks", value))
    if value in ("gpu", "cuda", "xpu"):
        return Outcome(words=("--device", "gpu"))
    if value == "auto" and sees_gpus():
        return Outcome(words=("--device", "auto"))
    if value in ("auto", "cpu"):
        return Outcome(words=("--device", "cpu", "--ranks", str(_cores())))
    raise Impossible(
        f"--nproc-per-node {value} is not a number of ranks",
        why="the value must be a number, gpu, cpu or auto",
        fix="--nproc-per-node 2",
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _node_rank(value: str, given: Given) -> Outcome:
    if value == "0":
        return Outcome()
    nodes = given.get("--nnodes", "2")
    ranks = given.get("--nproc-per-node", "4")
    raise Impossible(
        f"--node-rank {value}: Muster starts the ranks of all hosts with one command",
        why="torchrun is started on every host, but muster run only on the first; it connects to "
        "the others",
        fix=f"on the first host: muster run --hosts a,b --ranks {ranks} train.py  # over ssh; or: "
        f"muster run --join --nodes {nodes} --ranks {ranks} train.py, and here the muster join command "
        "that it prints",
    )


def _backend(value: str, given: Given) -> Outcome:
    return Outcome(note="" if value in ("static", "c10d") else _OWN_RENDEZVOUS)


def _endpoint(value: str, given: Given) -> Outcome:
    if given.get("--rdzv-backend", "").startswith("etcd"):
        return Outcome(note=_OWN_RENDEZVOUS)
    address, colon, port = value.rpartition(":")
    if not colon or value.endswith("]"):
        address, port = value, ""
    words = (*_address(address, given), *_port(port))
    return Outcome(words=words, note="" if words else _CHOSEN)


def _address(value: str, given: Given) -> tuple[str, ...]:
    """Return the rendezvous address; a name is looked up differently on each host."""
    try:
        address = ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        return ()
    useful = _several_hosts(given) and not address.is_loopback
    return ("--address", str(address)) if useful else ()


def _port(value: str) -> tuple[str, ...]:
    return () if value in ("", "0") else ("--port", value)


def _address_flag(value: str, given: Given) -> Outcome:
    words = _address(value, given)
    return Outcome(words=words, note="" if words else _CHOSEN)


def _port_flag(value: str, given: Given) -> Outcome:
    words = () if "--standalone" in given else _port(value)
    return Outcome(words=words, note="" if words else _CHOSEN)


def _conf(value: str, _: Given) -> Outcome:
    pairs = dict(one.partition("=")[::2] for one in value.split(",") if "=" in one)
    seconds = pairs.get("join_timeout") or pairs.get("timeout")
    if seconds is None:
        return Outcome(note="no effect: Muster configures the rendezvous")
    return Outcome(words=("--join-timeout", f"{seconds}s"))


def _accepted(_: str, __: Given) -> Outcome:
    return Outcome()


def _becomes(flag: str, unit: str = "") -> Callable[[str, Given], Outcome]:
    return lambda value, _: Outcome(words=(flag, f"{value}{unit}"))


def _unused(
    name: str, note: str, *, value: str = "X", short: str = "", usual: str = ""
) -> TorchrunFlag:
    """Return a flag that has no effect; its usual value is accepted without a note."""
    return TorchrunFlag(
        name=name,
        short=short,
        value=value,
        does=note,
        apply=lambda given, _: Outcome(note="" if given == usual else note),
    )


def _refused(name: str, why: str, fix: str, *, value: str = "") -> TorchrunFlag:
    def refuse(given: str, _: Given) -> Outcome:
        raise Impossible(f"{name} {given}".rstrip() + " is not supported", why=why, fix=fix)

    return TorchrunFlag(name=name, value=value, does=f"refused: {why}; {fix}", apply=refuse)


# Every flag of torchrun 2.12 to 2.15, and --use-env of torch.distributed.launch.
TORCHRUN_FLAGS = (
    TorchrunFlag(
        name="--nproc-per-node",
        value="N",
        does="`--ranks N`; `gpu`: `--device gpu`, a rank on each GPU; `cpu`: `--device cpu`, a rank "
        "on each core; `auto`: `gpu` if there are GPUs, else `cpu`",
        apply=_ranks,
    ),
    TorchrunFlag(
        name="--nnodes",
        value="N",
        does="`--nodes N` (or `MIN:MAX`), which needs `--hosts`, `--join`, `--slurm` or a Slurm job; 1 is "
        "the default",
        apply=_nodes,
    ),
    TorchrunFlag(
        name="--node-rank",
        value="N",
        does="0 is accepted, other values are refused: run one command, on the first host, with "
        "`--hosts a,b`; or use `muster run --join` and `muster join`",
        apply=_node_rank,
    ),
    TorchrunFlag(name="--standalone", does="accepted: this is Muster's default", apply=_accepted),
    TorchrunFlag(
        name="--max-restarts",
        value="N",
        does="the same flag; Muster restarts all ranks, with an empty store",
        apply=_becomes("--max-restarts"),
    ),
    TorchrunFlag(
        name="--rdzv-backend",
        value="NAME",
        does="no effect: the hosts meet at the launcher, so no rendezvous service is needed",
        apply=_backend,
    ),
    TorchrunFlag(
        name="--rdzv-endpoint",
        value="HOST:PORT",
        does="`--port PORT`, and with several hosts `--address HOST` if it is an IP address; no effect for etcd",
        apply=_endpoint,
    ),
    _unused("--rdzv-id", "no effect: each run has its own id", value="ID", usual="none"),
    TorchrunFlag(
        name="--rdzv-conf",
        value="KEY=VALUE,…",
        does="`join_timeout` or `timeout`: `--join-timeout`; other keys have no effect",
        apply=_conf,
    ),
    TorchrunFlag(
        name="--master-addr",
        value="ADDR",
        does="with several hosts `--address ADDR` if it is an IP address; else no effect",
        apply=_address_flag,
    ),
    TorchrunFlag(name="--master-port", value="N", does="`--port N`", apply=_port_flag),
    TorchrunFlag(
        name="--local-addr",
        value="ADDR",
        does="like `--master-addr`",
        apply=_address_flag,
    ),
    TorchrunFlag(
        name="--module",
        short="-m",
        does="the same flag, directly before the module",
        apply=_accepted,
    ),
    TorchrunFlag(
        name="--no-python",
        does="accepted; a program that is no Python code gets no heartbeat, so its hangs are not noticed",
        apply=_accepted,
    ),
    TorchrunFlag(name="--run-path", does="accepted: Muster always does this", apply=_accepted),
    TorchrunFlag(
        name="--log-dir",
        value="DIR",
        does="`--runs DIR`: run folders, with the logs, are created there",
        apply=_becomes("--runs"),
    ),
    _unused("--tee", _LOGS, short="-t", usual="0"),
    _unused("--redirects", _LOGS, short="-r", usual="0"),
    _unused("--local-ranks-filter", _LOGS, value="N,…"),
    _unused("--log-line-prefix-template", "no effect: each line begins with its rank"),
    _unused("--duplicate-stdout-filters", f"{_LOGS}; filter it with grep"),
    _unused("--duplicate-stderr-filters", f"{_LOGS}; filter it with grep"),
    _unused("--logs-specs", _LOGS, value="NAME"),
    _unused(
        "--event-log-handler",
        "no effect: the events are in events.jsonl of the run folder",
        value="NAME",
        usual="null",
    ),
    TorchrunFlag(
        name="--role",
        value="NAME",
        does="`--env ROLE_NAME=NAME`",
        apply=lambda value, _: Outcome(words=("--env", f"ROLE_NAME={value}")),
    ),
    _unused("--monitor-interval", "no effect: Muster checks every 0.1 s", value="S"),
    _unused("--start-method", "no effect: ranks are new processes, as with torchrun", value="NAME"),
    _refused(
        "--numa-binding",
        "Muster does not bind ranks to cores; it divides the threads among them",
        "leave it out, or bind in a wrapper: --no-python numactl …",
        value="MODE",
    ),
    _unused(
        "--signals-to-handle",
        "no effect: SIGTERM, Ctrl-C and Slurm's warning signal always reach the ranks",
        value="NAME,…",
    ),
    TorchrunFlag(
        name="--shutdown-timeout",
        value="S",
        does="`--grace Ss`",
        apply=_becomes("--grace", "s"),
    ),
    _refused(
        "--virtual-local-rank",
        "Muster makes all GPUs of a host visible to its ranks, and LOCAL_RANK is the device index",
        "leave it out, and use the device LOCAL_RANK",
    ),
    _refused(
        "--print-completion",
        "it starts no ranks",
        "muster completion bash, or: torchrun --print-completion bash",
        value="SHELL",
    ),
    TorchrunFlag(
        name="--use-env",
        does="(of `torch.distributed.launch`) no effect: Muster always sets `LOCAL_RANK`",
        apply=_accepted,
    ),
)
_BY_NAME = {name: flag for flag in TORCHRUN_FLAGS for name in (flag.name, flag.short) if name}


def flag_named(word: str, *, abbreviated: bool = False) -> TorchrunFlag | None:
    """Return torchrun's flag of this name, with hyphens or underscores; None if there is none.

    torchrun also takes a unique beginning of a name.
    """
    name = word.replace("_", "-") if word.startswith("--") else word
    if name in _BY_NAME or not abbreviated or not name.startswith("--"):
        return _BY_NAME.get(name)
    longer = [flag for flag in TORCHRUN_FLAGS if flag.name.startswith(name)]
    return longer[0] if len(longer) == 1 else None


def flag_table() -> list[str]:
    """Return the table as lines of Markdown."""
    rows = ["| flag of torchrun | `muster run` |", "|---|---|"]
    for flag in TORCHRUN_FLAGS:
        short = f"`{flag.short}`, " if flag.short else ""
        shown = f"{flag.name} {flag.value}".rstrip()
        rows.append(f"| {short}`{shown}` | {flag.does} |")
    return rows
