"""The ranks of one attempt on this host, as child processes of the node agent.

Each rank gets the environment that torchrun would give it (``rank_environment``) and a pipe for its output. The node agent
is the parent, so it knows the exact exit code and time of each rank, and sends signals only to its own children.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.launch import protocol
from torchmuster.launch.job import GRACE_VARIABLE, USUAL_GRACE_S
from torchmuster.launch.node.output import RankLog
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

_RANK_PROGRAM = Path(__file__).parents[1] / "rank" / "start.py"
_STORE_PROGRAM = Path(__file__).with_name("store.py")
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)
# torchrun's default, which libraries read.
_SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """One host's share of a run: its messages from the launcher, and its folders."""

    prepare: protocol.Prepare
    start: protocol.Start
    ranks: int
    logs: Path
    records: Path
    system: str = sys.platform

    @property
    def rank_numbers(self) -> range:
        """The ranks of this host."""
        return range(self.start.first_rank, self.start.first_rank + self.ranks)

    @property
    def has_store_process(self) -> bool:
        """Whether the first host serves the store in a process of its own; else rank 0 does.

        Only Linux hands on an open socket reliably, and the Windows builds of torch cannot listen on one.
        """
        return self.system == "linux"


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank's process exited: its exit code (negative: a signal), and when."""

    code: int
    at_unix_s: float


def rank_command(share: NodeShare, parent: int) -> list[str]:
    """Return the command of each rank, a child of the process ``parent``; the rank number is in the environment."""
    if share.prepare.program:
        return list(share.prepare.command)
    settings = {
        "records": str(share.records),
        "world_size": share.start.world_size,
        "first_step": share.start.first_step,
        "module": share.prepare.module,
        "parent": parent,
    }
    return [
        sys.executable,
        "-u",
        str(_RANK_PROGRAM),
        json.dumps(settings),
        *share.prepare.command,
    ]


def host_environment(
    prepare: protocol.Prepare,
    base: Mapping[str, str],
    devices: Mapping[str, str | None],
    threads: int,
) -> dict[str, str]:
    """Return the environment that all ranks of a host share; the user's variables are never overwritten."""
    merged = dict(base) | prepare.environment
    for name, value in devices.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    merged.setdefault("OMP_NUM_THREADS", str(threads))
    merged.setdefault(GRACE_VARIABLE, USUAL_GRACE_S)
    merged.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    merged[TOKEN_VARIABLE] = prepare.token
    return merged


def rank_environment(share: NodeShare, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank (tests/ranks/test_torchrun_environment.py compares them)."""
    start = share.start
    rank = str(start.first_rank + local_rank)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "GROUP_RANK": str(start.node_rank),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "ROLE_RANK": rank,
        "ROLE_NAME": share.prepare.environment.get("ROLE_NAME", "default"),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
        "TORCHELASTIC_RUN_ID": f"{share.prepare.run_id}.{start.attempt}",
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(start.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(share.has_store_process),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS_TO_HANDLE,
        "TORCHELASTIC_ERROR_FILE": str(share.records / f"rank-{rank}.torchelastic.json"),
    }
    if share.system == "win32":
        variables["USE_LIBUV"] = "0"  # the Windows builds of torch do not include it
    return variables


class RankProcess:
    """One rank, its output and its exit."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process, output: RankLog) -> None:
        self.rank = rank
        self.output = output
        self.exit: RankExit | None = None
        self._process = process

    @classmethod
    async def start(
        cls, share: NodeShare, local_rank: int, environment: Mapping[str, str]
    ) -> "RankProcess":
        """Start a rank; its output goes into a pipe that is read until the last process closes it."""
        rank = share.start.first_rank + local_rank
        output = RankLog(rank, share.logs / f"rank-{rank}.log")
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *rank_command(share, os.getpid()),
                cwd=share.prepare.folder,
                env={**environment, **rank_environment(share, local_rank)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # the node agent handles Ctrl-C
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        output.drain(reading, attempt=share.start.attempt)
        return cls(rank, process, output)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not exited."""
        return self._process.returncode is None

    async def wait(self) -> RankExit:
        """Wait until the process exits; its children may keep its output open for longer."""
        code = await self._process.wait()
        self.exit = RankExit(code=code, at_unix_s=time.time())
        return self.exit

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has exited."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; without one, most signals would kill it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
        except OSError:
            return False
        caught = _CAUGHT.search(status)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)

    def terminate(self) -> None:
        """Ask the rank to stop."""
        self.send_signal(signal.SIGTERM)


class StoreProcess:
    """The process that serves the ranks' store, for one attempt after the other."""

    def __init__(
        self, process: asyncio.subprocess.Process, connection: socket.socket, log: Path
    ) -> None:
        self._process = process
        self._connection = connection
        self._log = log

    @classmethod
    async def start(cls, folder: Path, environment: Mapping[str, str]) -> "StoreProcess":
        """Start the process; its messages go into ``folder``."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        path = folder / "store.log"
        with path.open("wb") as log, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(_STORE_PROGRAM)),
                env=environment,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(process, ours, path)

    @property
    def pid(self) -> int:
        """The process id, which is also that of its session."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not exited."""
        return self._process.returncode is None

    def serve(self, listener: socket.socket, address: str) -> None:
        """Serve a new, empty store on a socket that this node agent has opened."""
        message = json.dumps([address, listener.getsockname()[1]]).encode()
        with contextlib.suppress(OSError):  # it has exited, which the attempt notices
            socket.send_fds(self._connection, [message], [listener.fileno()])

    async def wait(self) -> None:
        """Wait until the store exits, which it does by itself only if it fails."""
        await self._process.wait()

    def failure(self) -> str:
        """Return why the store has exited."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        return (
            f"the ranks' store exited with code {self._process.returncode}\n{log[-2000:]}".strip()
        )

    async def end(self) -> None:
        """Close the store."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
