"""Start ranks on this host within milliseconds: forked from one process that has imported torch.

Used where the same small program starts many times, as in ``muster prove`` and ``muster lab``. The process is that of
Python's ``forkserver``. Ranks get the variables of torchrun, and meet at a store on a socket that is open from the
beginning, so that nobody can take its port.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """What each rank runs: ``function(rank, *arguments)``; the function is imported in the rank."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int
    folder: Path  # the working directory
    logs: Path  # standard output and error, as rank-0.log
    environment: Mapping[str, str]


def start_server(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process from which ranks are forked, unless it runs; it imports these modules once.

    It inherits the environment, which libraries may read when they are imported.
    """
    with _variables_set(environment):
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()


@contextlib.contextmanager
def started(program: RankProgram, *, fresh: bool = False) -> Iterator[list[BaseProcess]]:
    """Start the ranks; at the end kill those that are left, with their own processes.

    ``fresh`` ranks are new interpreters, each with its own seed for the order of sets, as in a real run.
    """
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    processes: list[BaseProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        for rank in range(program.ranks):
            store_of_rank = store if rank == 0 else None
            arguments = (program, rank, port, store_of_rank)
            processes.append(context.Process(target=_be_rank, args=arguments))
        try:
            with _variables_set(program.environment):  # new interpreters read some at their start
                for process in processes:
                    process.start()
            store.close()  # rank 0 has it
            yield processes
        finally:
            for process in processes:
                _kill(process)


def end_text(process: BaseProcess) -> str:
    """Return how a rank ended, such as ``killed by SIGKILL``."""
    code = process.exitcode or 0
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def send_signal(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal to a rank, unless it has ended or never began."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


@contextlib.contextmanager
def _variables_set(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        # The rank first: one that has just begun may otherwise set its process group and start a process after the group was killed.
        process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    process.close()


def _be_rank(program: RankProgram, rank: int, port: int, store: socket.socket | None) -> None:
    """Run the program as one rank, in a process that has just been forked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)  # so that its own processes are killed with it
    os.environ.update(_rank_variables(rank, program.ranks, port))
    os.environ.update(program.environment)
    multiprocessing.set_start_method(None, force=True)  # loader workers as in any other process
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python does this after a fork for its own generator
    tempfile.tempdir = None  # another one than that of the process from which this one was forked
    # The same for the sockets of loader workers; muster prove refuses writes to that of the parent process.
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    os.chdir(program.folder)
    log = os.open(program.logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    server = None
    if store is not None:
        from torchmuster.launch.node.store import serve

        address, port = store.getsockname()
        server = serve(address, port, store.detach())
    try:
        program.function(rank, *program.arguments)
    finally:
        del server


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 serves it before the program begins
    }
