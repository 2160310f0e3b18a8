"""Run the ranks of a trial, forked from one process that has imported torch and the libraries of the script.

A proof starts a script ten times or more; importing takes most of the time of a short run. The process is that of Python's
``forkserver``. Ranks get the variables of torchrun; when one fails, the others get SIGTERM, and are killed 30 s later.
"""

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.prove.records import TrialRequest, file_of

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torchmuster.prove.probes.recorded",
    "torchmuster.prove.probes.before_libraries",
)
# Libraries whose import does not depend on the rank (Lightning's does), if the script mentions them.
_LIBRARIES = {
    "transformers": ("transformers.trainer", "accelerate"),
    "trl": ("transformers.trainer", "accelerate", "datasets"),
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "torchmuster": ("torchmuster.worker.training", "transformers.models.auto.modeling_auto"),
}
# peft, which the trainer imports, imports bitsandbytes, which starts CUDA; a forked rank could not use a GPU then.
_STARTS_CUDA = {"transformers.trainer": "transformers.models.auto.modeling_auto"}
_GRACE_S = 30.0  # as torchrun
_HANGS_AFTER_S = 180.0  # without a new step or line of output
_STARTS_WITHIN_S = 1800.0
_SAY_EVERY_S = 10.0
_PR_SET_PDEATHSIG = 1


def preload_for(source: str, environment: dict[str, str]) -> None:
    """Choose what the process imports from which ranks are forked, by the source of the script.

    It inherits the variables, which libraries may read when they are imported.
    """
    os.environ.update(environment)
    gpus = environment.get("CUDA_VISIBLE_DEVICES") != ""
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded(source, gpus=gpus))


def preloaded(source: str, *, gpus: bool) -> list[str]:
    """Return the modules to import before ranks are forked; with GPUs, none that starts CUDA."""
    names = [
        name
        for library, modules in _LIBRARIES.items()
        if re.search(rf"\b(?:import|from)\s+{library}\b", source)
        for name in modules
    ]
    if gpus and importlib.util.find_spec("bitsandbytes"):
        names = [_STARTS_CUDA.get(name, name) for name in names]
    return [*_PRELOADED, *names]


def run_ranks(
    request: TrialRequest,
    environment: dict[str, str],
    *,
    fresh: bool = False,
    doing: str,
    say: Callable[[str], None],
) -> str:
    """Run a trial; return why it failed, or "".

    ``fresh`` ranks are new interpreters, each with its own seed for the order of sets, as in a real run.
    """
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    processes: list[BaseProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as store:
        shared = {
            **environment,
            "WORLD_SIZE": str(request.ranks),
            "LOCAL_WORLD_SIZE": str(request.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": request.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 serves it before the script begins
        }
        text = msgspec.json.encode(request)
        for rank in range(request.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            socket_of_rank = None if rank else store
            arguments = (text, {**shared, **own}, rank, socket_of_rank)
            processes.append(context.Process(target=_be_rank, args=arguments))
        try:
            for process in processes:
                process.start()
            store.close()  # rank 0 has it
            return _watch(processes, request, doing, say)
        finally:
            for process in processes:
                if process.pid is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    process.join()
                process.close()


def _watch(
    processes: Sequence[BaseProcess],
    request: TrialRequest,
    doing: str,
    say: Callable[[str], None],
) -> str:
    """Wait for all ranks; when one fails, stop the others."""
    begun_s = said_s = grown_s = time.monotonic()
    size, trouble, ends_s = 0, "", None
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=0.2)
        now_s = time.monotonic()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed and ends_s is None:
            trouble = _failure(request, processes, failed)
            ends_s = now_s + _GRACE_S
            _signal(alive, signal.SIGTERM)
        if ends_s is not None and now_s > ends_s:
            _signal(alive, signal.SIGKILL)
        if (written := _written(request)) != size:
            size, grown_s = written, now_s
        files = [file_of(Path(request.into), rank) for rank in range(request.ranks)]
        recorded = any(path.exists() and path.stat().st_size for path in files)
        if now_s - grown_s > (_HANGS_AFTER_S if recorded else _STARTS_WITHIN_S) and ends_s is None:
            trouble = f"the ranks hang: no step and no output for {now_s - grown_s:.0f} s"
            ends_s = now_s
        if now_s - said_s > _SAY_EVERY_S:
            said_s = now_s
            say(f"{doing}: {now_s - begun_s:.0f} s so far")
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return trouble or (_failure(request, processes, failed) if failed else "")


def _signal(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _written(request: TrialRequest) -> int:
    """Return the size of everything that the ranks wrote about themselves."""
    total = 0
    for path in Path(request.into).iterdir():
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _failure(request: TrialRequest, processes: Sequence[BaseProcess], failed: Sequence[int]) -> str:
    """Describe the first failure: the exception of a rank, or its signal."""
    errors = [path for rank in failed if (path := _error_file(request, rank)).exists()]
    if errors:
        first = min(errors, key=lambda path: path.stat().st_mtime)
        rank = first.name.removeprefix("rank-").partition(".")[0]
        text = first.read_text(encoding="utf-8", errors="replace").strip()
        return f"rank {rank}: {text.splitlines()[-1]}\n{text}"
    code = processes[failed[0]].exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    log = Path(request.into) / f"rank-{failed[0]}.log"
    tail = (
        log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:] if log.exists() else []
    )
    return "\n".join([f"rank {failed[0]} exited with {how}", *tail])


def _error_file(request: TrialRequest, rank: int) -> Path:
    return Path(request.into) / f"rank-{rank}.error"


def _be_rank(
    request_json: bytes, environment: dict[str, str], rank: int, store: socket.socket | None
) -> None:
    """Run the script as one rank, in a process that has just been forked.

    ``store`` is the open socket at which rank 0 serves the ranks' store: nobody can take its port.
    """
    request = msgspec.json.decode(request_json, type=TrialRequest)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    os.setpgid(0, 0)  # so that its own processes are killed with it
    multiprocessing.set_start_method(None, force=True)  # loader workers as in any other process
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python does this after a fork for its own generator
    tempfile.tempdir = None  # another one than that of the process from which this one was forked
    os.chdir(request.folder)
    log = os.open(Path(request.into) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # In a fresh interpreter nothing is imported yet.
    import torchmuster.prove.probes.before_libraries  # noqa: F401
    from torchmuster.prove.probes.recorded import run_recorded, serve_store

    server = None if store is None else serve_store(store)
    try:
        run_recorded(request)
    except SystemExit as end:
        if end.code not in (None, 0):
            _error_file(request, rank).write_text(f"the script exited with: {end.code}\n")
        raise
    except BaseException:
        _error_file(request, rank).write_text(traceback.format_exc())
        raise
    finally:
        del server
