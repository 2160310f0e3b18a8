"""Run the ranks of a trial, and watch them as a launcher does.

They are forked from a process that has imported torch and the libraries of the script: a proof starts a script ten times or
more, and importing takes most of the time of a short run. When a rank fails, the others get SIGTERM, and are killed 30 s
later, as under torchrun.
"""

import importlib.util
import math
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchmuster.launch import forked_ranks
from torchmuster.launch.forked_ranks import RankProgram
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
_GRACE_S = 30.0
_HANGS_AFTER_S = 180.0  # without a new step or line of output
_STARTS_WITHIN_S = 1800.0
_LOG_LINES = 5
_PACKAGE = Path(__file__).parents[1]
# Their lines in the traceback of a script say nothing about it.
_HOOKS = tuple(f"{_PACKAGE}/{name}/" for name in ("prove", "launch", "integrations"))


def start_server(source: str, environment: Mapping[str, str]) -> None:
    """Start the process from which ranks are forked, with the libraries that the script's source mentions."""
    modules = list(_PRELOADED)
    starts_cuda = {}
    if environment.get("CUDA_VISIBLE_DEVICES") != "" and importlib.util.find_spec("bitsandbytes"):
        starts_cuda = _STARTS_CUDA
    for library, names in _LIBRARIES.items():
        if re.search(rf"\b(?:import|from)\s+{library}\b", source):
            modules += [starts_cuda.get(name, name) for name in names]
    forked_ranks.start_server(modules, environment)


def run_trial(request: TrialRequest, environment: Mapping[str, str], *, fresh: bool = False) -> str:
    """Run a trial; return why it failed, or "". ``fresh`` ranks are new interpreters."""
    program = RankProgram(
        function=_be_trial,
        arguments=(request,),
        ranks=request.ranks,
        folder=Path(request.folder),
        logs=Path(request.into),
        environment=environment,
    )
    with forked_ranks.started(program, fresh=fresh) as processes:
        return _watch(processes, request)


def _watch(processes: Sequence[BaseProcess], request: TrialRequest) -> str:
    """Wait for all ranks; when one fails or all hang, stop the others, and return why."""
    into = Path(request.into)
    size, grown_s = 0, time.monotonic()
    trouble, kill_s = "", math.inf
    alive = list(processes)
    while alive:
        wait([process.sentinel for process in alive], timeout=0.2)
        now_s = time.monotonic()
        alive = [process for process in processes if process.exitcode is None]
        written = sum(path.stat().st_size for path in into.glob("rank-*"))
        if written != size:
            size, grown_s = written, now_s
        if not trouble:
            trouble = _failure(into, processes)
            if trouble:
                kill_s = now_s + _GRACE_S
                _signal(alive, signal.SIGTERM)
            elif now_s - grown_s > _limit_of_silence(request):
                trouble = f"the ranks hang: no step and no output for {now_s - grown_s:.0f} s"
                kill_s = now_s
        if now_s >= kill_s:
            _signal(alive, signal.SIGKILL)
    return trouble


def _limit_of_silence(request: TrialRequest) -> float:
    for rank in range(request.ranks):
        path = file_of(Path(request.into), rank)
        if path.exists() and path.stat().st_size:
            return _HANGS_AFTER_S
    return _STARTS_WITHIN_S  # no step is recorded yet


def _signal(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        forked_ranks.send_signal(process, number)


def _failure(into: Path, processes: Sequence[BaseProcess]) -> str:
    """Describe the first failure, the exception of a rank or its signal; "" if there is none."""
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if not failed:
        return ""
    errors = [(rank, into / f"rank-{rank}.error") for rank in failed]
    errors = [(rank, path) for rank, path in errors if path.exists()]
    if errors:
        rank, path = min(errors, key=lambda error: error[1].stat().st_mtime)
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        return f"rank {rank}: {text.splitlines()[-1]}\n{text}"
    rank = failed[0]
    log = into / f"rank-{rank}.log"
    lines = [f"rank {rank}: {forked_ranks.end_text(processes[rank])}"]
    if log.exists():
        lines += log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join(lines)


def _be_trial(rank: int, request: TrialRequest) -> None:
    """Run the script of a trial as one rank, and write down its error."""
    # In a fresh interpreter nothing is imported yet.
    import torchmuster.prove.probes.before_libraries  # noqa: F401
    from torchmuster.prove.probes.recorded import run_recorded

    error_file = Path(request.into) / f"rank-{rank}.error"
    try:
        run_recorded(request)
    except SystemExit as end:
        if end.code not in (None, 0):
            error_file.write_text(f"the script exited with: {end.code}\n")
        raise
    except BaseException as error:
        report = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in report.stack if not frame.filename.startswith(_HOOKS)]
        report.stack = traceback.StackSummary.from_list(frames)
        error_file.write_text("".join(report.format()))
        raise
