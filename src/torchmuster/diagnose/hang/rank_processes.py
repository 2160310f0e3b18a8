"""Find the ranks of distributed jobs on this host, by the environment that launchers give them."""

import contextlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster.errors import Impossible
from torchmuster.launch.node.heartbeats import read_process
from torchmuster.redaction import printable

# What torchrun sets, and every launcher that imitates it.
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
# Starts a rank of `muster run`; its first argument is not the script's.
_RANK_PROGRAM = "torchmuster/launch/rank/start.py"


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a job on a host."""

    job: str  # MASTER_ADDR:MASTER_PORT, and the run id that torchrun was given
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    pid: int
    command: str
    started_unix_s: float
    related: tuple[int, ...]  # its ancestors and descendants
    uses_gpu: bool = False


class RanksHere(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks on a host, and how many processes could not be read."""

    ranks: tuple[RankProcess, ...]
    unreadable: int = 0


async def find_ranks(_: Any) -> Any:
    """Return the ranks on this host (a verb of ``host_probe.py``)."""
    return msgspec.to_builtins(ranks_here())


def ranks_here() -> RanksHere:
    """Return the ranks on this host.

    Children, such as data loader workers, inherit the environment: a rank is the topmost Python process with its
    number, below the scripts that may have started it.
    """
    if sys.platform != "linux":
        raise Impossible(
            "muster hang works on Linux only",
            why="it finds ranks by the environment of their processes, in /proc",
            fix="run it on the Linux host on which the ranks run",
        )
    environments: dict[int, Mapping[str, str]] = {}  # of processes that may be ranks
    unreadable = 0
    for pid in psutil.pids():
        process = read_process(pid)
        if process is None or process.state in ("X", "Z"):
            continue
        try:
            environment = _environment(pid)
        except PermissionError:
            unreadable += 1
            continue
        except OSError:  # it has exited
            continue
        if all(environment.get(name) for name in _NEEDED):
            environments[pid] = environment
    ranks = []
    for pid in _topmost(environments):
        rank = _rank_process(pid, environments[pid])
        if rank is not None:
            ranks.append(rank)
    return RanksHere(ranks=tuple(ranks), unreadable=unreadable)


def uses_gpu(pid: int) -> bool:
    """Return whether a process has opened a GPU."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith(("/dev/nvidia", "/dev/kfd")):
                    return True
    return False


def _environment(pid: int) -> dict[str, str]:
    """Return the environment of a process; {} if it is of no rank."""
    content = Path(f"/proc/{pid}/environ").read_bytes()
    if b"WORLD_SIZE=" not in content:
        return {}
    environment = {}
    for entry in content.decode(errors="replace").split("\0"):
        name, _, value = entry.partition("=")
        environment[name] = value
    return environment


def _topmost(environments: Mapping[int, Mapping[str, str]]) -> Iterable[int]:
    """Return one process for each rank of each job: the topmost Python process, else the topmost one."""
    above = {pid: _ancestors(pid) for pid in environments}
    chosen: dict[tuple[str, str], int] = {}
    for pid in sorted(environments, key=lambda pid: len(above[pid])):
        environment = environments[pid]
        identity = (_job_name(environment), environment["RANK"])
        first = chosen.setdefault(identity, pid)
        if first in above[pid] and not _is_python(first):  # a script that started the rank
            chosen[identity] = pid
    return chosen.values()


def _job_name(environment: Mapping[str, str]) -> str:
    name = environment["MASTER_ADDR"]
    port = environment.get("MASTER_PORT")
    if port:
        name += f":{port}"
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    return name if run in ("", "none") else f"{name}/{run}"


def _ancestors(pid: int) -> list[int]:
    """Return the ancestors of a process, nearest first, without init."""
    try:
        return [parent.pid for parent in psutil.Process(pid).parents() if parent.pid > 1]
    except psutil.Error:  # it has exited
        return []


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    return False


def _rank_process(pid: int, environment: Mapping[str, str]) -> RankProcess | None:
    try:
        process = psutil.Process(pid)
        children = [child.pid for child in process.children(recursive=True)]
        return RankProcess(
            job=_job_name(environment),
            rank=int(environment["RANK"]),
            local_rank=int(environment["LOCAL_RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE") or 0),
            pid=pid,
            command=printable(_typed_command(process.cmdline())),
            started_unix_s=process.create_time(),
            related=(*_ancestors(pid), *children),
            uses_gpu=uses_gpu(pid),
        )
    except (psutil.Error, OSError, ValueError):  # it has exited, or is no rank
        return None


def _typed_command(arguments: list[str]) -> list[str]:
    """Return the command of a rank as it was typed: without the program with which ``muster run`` starts it."""
    for index, argument in enumerate(arguments):
        if argument.endswith(_RANK_PROGRAM):
            return ["muster", "run", *arguments[index + 2 :]]
    return arguments
