"""A process on a host that has imported torch in advance, so that a restart imports nothing.

It waits for the arguments of one attempt, then becomes torchrun's agent (``elastic_agent.py``). Before it starts a thread or opens a
store, it forks one process for each rank; the agent starts a rank by sending that process its arguments and environment. So the ranks are
children of the agent, as always, and have torch imported.

A forked rank differs from a new interpreter in two ways: torch has been imported before the script runs, so the script cannot set
variables that torch reads when it is imported, and all ranks of a host have the same hash seed. The parent never initializes CUDA.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchmuster.launch.job import is_ours
from torchmuster.launch.node.engines import NodeShare, TorchrunEngine, agent_arguments
from torchmuster.launch.rank import start

_PROGRAM = "torchmuster.launch.node.elastic_agent"
# Says to elastic_agent.py that it is started in advance; the descriptor of its socket follows.
WARM_FLAG = "--warm"
_TORCH = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torchmuster.launch.rank.heartbeat",
)
# What ``muster train`` runs on each rank; other scripts may set variables before they import their libraries.
_WORKER = (
    "torchmuster.config.training",
    "torchmuster.config.written",
    "torchmuster.worker.reporting",
    "torchmuster.worker.training",
    "ruamel.yaml",
)
_LENGTH = struct.Struct("!I")
# Stands for the number that the listening socket of the store gets in the process.
_SOCKET = "{socket}"
_LOOK_EVERY_S = 0.02
# Room for the variables of a rank where /proc shows the environment of its process.
_ROOM, _ROOM_BYTES = "TORCHMUSTER_ROOM", 4096


# ---- the node agent's side


class WarmAgent:
    """A process that becomes torchrun's agent when it gets its arguments."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: socket.socket, *, token: str, log: Path
    ) -> None:
        self.process = process
        self.token = token
        self.log = log
        self._channel = channel

    @classmethod
    async def begin(
        cls,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        *,
        token: str,
        log: Path,
    ) -> "WarmAgent":
        """Start the process; it imports what the command needs while the caller does something else."""
        ours, its = socket.socketpair()
        modules = (*_TORCH, *(_WORKER if is_ours(command) else ()))
        with its, log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-m", _PROGRAM, WARM_FLAG, str(its.fileno()), *modules),
                cwd=folder,
                env={**environment, _ROOM: "-" * _ROOM_BYTES},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(its.fileno(),),
                start_new_session=True,
            )
        return cls(process, ours, token=token, log=log)

    @property
    def is_alive(self) -> bool:
        """Whether it waits or is importing; a process without memory may have been killed."""
        return self.process.returncode is None

    def send(self, order: Mapping[str, Any], listener: int | None) -> None:
        """Send the arguments of an attempt, and the listening socket of its store."""
        data = json.dumps(order).encode()
        with self._channel:
            handles = [] if listener is None else [listener]
            socket.send_fds(self._channel, [_LENGTH.pack(len(data))], handles)
            self._channel.sendall(data)

    async def close(self) -> None:
        """Kill the process if it has not become an agent."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class WarmEngine(TorchrunEngine):
    """torchrun's elastic agent in a process that was started in advance."""

    def __init__(self, share: NodeShare, environment: Mapping[str, str], warm: WarmAgent) -> None:
        super().__init__(share, environment)
        self._warm = warm
        self._early_log = warm.log
        self._socket = share.socket
        self._order = {
            "arguments": agent_arguments(share, socket_name=_SOCKET),
            "environment": dict(environment),
            "folder": share.prepare.folder,
            "ranks": share.ranks,
            "log": str(share.records / "agent.log"),
        }

    async def start(self) -> int:
        """Send the waiting process its arguments."""
        self._process = self._warm.process
        self._warm.send(self._order, self._socket)
        return self._process.pid


# ---- the process itself


def serve_warm(arguments: Sequence[str]) -> tuple[list[str], "ForkedRanks"]:
    """Import torch, wait for the arguments of an attempt, and fork its ranks; return the agent's arguments and the ranks.

    In a rank this function does not return: it raises ``SystemExit`` when the script is over.
    """
    channel = socket.socket(fileno=int(arguments[0]))
    for name in arguments[1:]:
        importlib.import_module(name)
    order, listener = _receive(channel)
    channel.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    ranks = ForkedRanks(order["ranks"], close=listener)
    words = [
        word.replace(_SOCKET, str(listener)) if word.startswith("--rdzv-conf=") else word
        for word in order["arguments"]
    ]
    return words, ranks


def _receive(channel: socket.socket) -> tuple[dict[str, Any], int | None]:
    head, handles, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    if len(head) < _LENGTH.size:
        os._exit(0)  # the node agent does not need this process
    data = _read(channel, _LENGTH.unpack(head)[0])
    for handle in handles:
        os.set_inheritable(handle, False)
    order: dict[str, Any] = json.loads(data)
    return order, handles[0] if handles else None


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


class ForkedRanks:
    """The forked processes of this host's ranks, which torchrun's agent starts instead of new interpreters."""

    def __init__(self, ranks: int, *, close: int | None) -> None:
        """Fork the processes; each of them waits for its arguments and runs the rank, without the socket ``close``."""
        self._waiting: dict[int, tuple[int, socket.socket]] = {}
        for local_rank in range(ranks):
            ours, its = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self._waiting.values():
                    other.close()
                if close is not None:
                    os.close(close)
                _be_rank(its)
            its.close()
            self._waiting[local_rank] = (pid, ours)

    def handler(
        self, *, entrypoint: str, args: Sequence[str], env: Mapping[str, str], **_: object
    ) -> "RankHandler":
        """Start a rank in its process: replaces torch's ``get_subprocess_handler``."""
        pid, channel = self._waiting.pop(int(env["LOCAL_RANK"]))
        order = {"arguments": [entrypoint, *args], "environment": {**env, **os.environ, **env}}
        data = json.dumps(order).encode()
        with channel, contextlib.suppress(OSError):  # if it was killed, its exit code shows it
            channel.recv(1)  # it has its own process group, which gets the signals of the agent
            channel.sendall(_LENGTH.pack(len(data)) + data)
        return RankHandler(ForkedRank(pid))


class ForkedRank:
    """The process of a rank, with the methods of ``subprocess.Popen`` that torchrun's agent calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise ``TimeoutExpired`` if it still runs after ``timeout``."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_LOOK_EVERY_S)
        return code


class RankHandler:
    """A rank as torchrun's agent sees it: its process, and how to stop it."""

    def __init__(self, rank: ForkedRank) -> None:
        self.proc = rank

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the rank and its children."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def _be_rank(channel: socket.socket) -> NoReturn:
    """Run a rank in this process, which has just been forked."""
    os.setsid()  # as the agent starts ranks: it signals the group
    start.die_with_parent()
    channel.send(b"r")
    head = channel.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        os._exit(0)  # the agent has failed before it started the ranks
    order = json.loads(_read(channel, _LENGTH.unpack(head)[0]))
    channel.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    _show_process(order["arguments"], order["environment"])
    signal.set_wakeup_fd(-1)
    random.seed()
    # As in new processes, which all have different seeds; CUDA's generators do not exist yet.
    sys.modules["torch"].default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    tempfile.tempdir = None
    # The arguments are: the interpreter, -u, the path of rank/start.py, its settings, and the command.
    sys.argv = order["arguments"][2:]
    sys.orig_argv[:] = order["arguments"]
    start.main()
    raise SystemExit(0)


def _show_process(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write a rank's command and variables to where /proc shows them: ``ps`` and ``muster hang`` identify it by them.

    Python and libc have copies of all variables by now, so nothing else reads this memory.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    arguments_at, arguments_end, variables_at, variables_end = map(int, fields[45:49])
    settings = 3  # the fourth argument is long, and of no use to others
    shown = [word for place, word in enumerate(arguments) if place != settings]
    _write_texts(arguments_at, arguments_end, shown)
    variables = (f"{name}={value}" for name, value in environment.items())
    _write_texts(variables_at, variables_end, variables)


def _write_texts(begin: int, end: int, texts: Iterable[str]) -> None:
    data = b""
    for text in texts:
        piece = os.fsencode(text) + b"\0"
        if len(data) + len(piece) <= end - begin:
            data += piece
    if begin < end:
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)
