"""Find the ranks of distributed jobs on this host, by the environment that launchers give them."""

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster.errors import Impossible
from torchmuster.launch.node.heartbeats import look_at_process
from torchmuster.redaction import printable

_PROC = Path("/proc")
# What torchrun sets, and every launcher that imitates it.
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_RAS_PORT = 28028
# Starts a rank of `muster run`; its first argument is not the script's.
_RANK_PROGRAM = "torchmuster/launch/rank/start.py"
# Variables with the place where the flight recorder writes, newest first. The rank is appended.
_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


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
    recorder_file: str = ""  # its flight recorder's dump, if one was written


class RanksHere(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks on a host, and how many processes could not be read."""

    ranks: tuple[RankProcess, ...]
    unreadable: int = 0
    nccl_ras: bool = False  # NCCL's own service for questions about a job answers here


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
    parents: dict[int, int] = {}
    candidates: dict[int, tuple[str, Mapping[str, str]]] = {}
    unreadable = 0
    for pid in psutil.pids():
        stat = look_at_process(pid)
        if stat is None or stat.state in ("X", "Z"):
            continue
        parents[pid] = stat.parent
        try:
            variables = _variables(pid)
        except PermissionError:
            unreadable += 1
            continue
        except OSError:  # it has exited
            continue
        if all(variables.get(name) for name in _NEEDED):
            candidates[pid] = (_job_name(variables), variables)
    same = {pid: (job, variables["RANK"]) for pid, (job, variables) in candidates.items()}
    found: dict[tuple[str, str], int] = {}
    for pid in sorted(candidates, key=lambda pid: len(_above(pid, parents))):
        held = found.get(same[pid])
        if held is None or (not _is_python(held) and held in _above(pid, parents)):
            found[same[pid]] = pid
    ranks = tuple(
        rank
        for pid in found.values()
        if (rank := _rank_process(pid, *candidates[pid], parents)) is not None
    )
    ras = any(one.uses_gpu for one in ranks) and _answers(_RAS_PORT)
    return RanksHere(ranks=ranks, unreadable=unreadable, nccl_ras=ras)


def _variables(pid: int) -> dict[str, str]:
    text = (_PROC / str(pid) / "environ").read_bytes()
    if b"WORLD_SIZE=" not in text:
        return {}
    pairs = (one.partition("=") for one in text.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _job_name(variables: Mapping[str, str]) -> str:
    address = f"{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', '')}".rstrip(":")
    run = variables.get("TORCHELASTIC_RUN_ID", "")
    return address if run in ("", "none") else f"{address}/{run}"


def _above(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return the ancestors of a process, nearest first, without init."""
    found: list[int] = []
    while (pid := parents.get(pid, 0)) > 1 and pid not in found:
        found.append(pid)
    return found


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in (_PROC / str(pid) / "exe").readlink().name
    return False


def _rank_process(
    pid: int, job: str, variables: Mapping[str, str], parents: Mapping[int, int]
) -> RankProcess | None:
    below = [one for one in parents if pid in _above(one, parents)]
    try:
        process = psutil.Process(pid)
        rank, local_rank = int(variables["RANK"]), int(variables["LOCAL_RANK"])
        return RankProcess(
            job=job,
            rank=rank,
            local_rank=local_rank,
            world_size=int(variables["WORLD_SIZE"]),
            local_world_size=int(variables.get("LOCAL_WORLD_SIZE") or 0),
            pid=pid,
            command=printable(_typed_command(process.cmdline())),
            started_unix_s=process.create_time(),
            related=(*_above(pid, parents), *below),
            uses_gpu=_uses_gpu(pid),
            recorder_file=_recorder_file(pid, rank, variables, process.create_time()),
        )
    except (psutil.Error, OSError, ValueError):  # it has exited, or is no rank
        return None


def _typed_command(arguments: list[str]) -> list[str]:
    """Return the command of a rank as it was typed: without the program with which ``muster run`` starts it."""
    for number, argument in enumerate(arguments):
        if argument.endswith(_RANK_PROGRAM):
            return ["muster", "run", *arguments[number + 2 :]]
    return arguments


def _uses_gpu(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for one in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(one.readlink()).startswith(("/dev/nvidia", "/dev/kfd")):
                    return True
    return False


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=0.5):
        return True
    return False


def _recorder_file(pid: int, rank: int, variables: Mapping[str, str], started_unix_s: float) -> str:
    """Return the dump that a rank's flight recorder has written, as the rank sees its path."""
    cache = variables.get("XDG_CACHE_HOME") or f"{variables.get('HOME')}/.cache"
    usual = f"{cache}/torch/comm_lib_trace_rank_"
    prefix = next((variables[name] for name in _RECORDER_FILES if variables.get(name)), usual)
    file = os.path.join(f"/proc/{pid}/cwd", f"{prefix}{rank}")  # noqa: PTH118
    with contextlib.suppress(OSError):
        if Path(file).stat().st_mtime >= started_unix_s:  # else an earlier job's
            return f"{prefix}{rank}"
    return ""
