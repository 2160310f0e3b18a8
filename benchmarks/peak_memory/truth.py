"""The peak of tensor bytes in real gloo ranks, counted by torch's own allocator calls (``tensor_bytes.c``).

``Truth`` is one process that has imported torch under the preloaded counter. It forks the ranks of each case, so that a case
costs no imports. Each rank takes steps; from the third that was taken on (fp16 leaves some out) they are alike.

The thread of gloo that runs a collective gives its buffers back a moment after the collective has ended, and on a busy machine that
may take long: whether they count would be chance. So ranks pause for a moment after each of FSDP's collectives, the
least peak of the steps counts, and steps of FSDP are taken until it has come twice on every rank. Of the ranks, the one with the
largest counts.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from torchmuster.plan.real_steps import RealSteps
from torchmuster.runfolder import write_atomically

_BENCHMARKS = Path(__file__).parents[1]
_COUNTER = Path(__file__).with_name("tensor_bytes.c")
STEADY = 2  # from this step on, counted from 0, steps are alike
_MOST_STEPS = 24
_PAUSE_S = 0.001
# A rank that waits in a collective for one that died would wait long.
_COLLECTIVE_S = 600


def counter_library(folder: Path) -> Path:
    """Return the counter, compiled if it is not yet."""
    library = folder / "tensor_bytes.so"
    if not library.exists() or library.stat().st_mtime < _COUNTER.stat().st_mtime:
        compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
        made = library.with_suffix(f".{os.getpid()}")
        words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(_COUNTER), "-ldl"]
        subprocess.run(words, check=True)
        made.replace(library)
    return library


class Truth:
    """Measures cases one after the other; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._environment = {
            **os.environ,
            "LD_PRELOAD": str(counter_library(folder)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Truth":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peak_memory.truth"],
            env=self._environment,
            cwd=_BENCHMARKS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        process, questions, answers = self._at_work()
        questions.close()
        answers.close()
        process.wait()

    def measure(self, steps: RealSteps) -> list[dict[str, Any]]:
        """Return what each rank saw: ``peaks_bytes`` of its steps, or ``failed`` with the traceback."""
        _, questions, answers = self._at_work()
        questions.write(msgspec.json.encode(steps).decode() + "\n")
        questions.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError("the process that measures has ended; what it said is above")
        told: list[dict[str, Any]] = json.loads(line)
        return told

    def _at_work(self) -> tuple[subprocess.Popen[str], IO[str], IO[str]]:
        process = self._process
        assert process is not None, "it is a context manager"
        assert process.stdin is not None
        assert process.stdout is not None
        return process, process.stdin, process.stdout


def _serve() -> None:
    """Read cases, one a line, and answer each with a line; runs under the counter."""
    import torch
    import torch._dynamo  # a second of work that the first optimizer of each rank would do
    import torch.distributed.fsdp
    import transformers  # noqa: F401

    import torchmuster.plan.probes.build_step  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints is no answer
    for line in sys.stdin:
        steps = msgspec.json.decode(line, type=RealSteps)
        print(json.dumps(_ranks(steps)), file=answers, flush=True)


def _ranks(steps: RealSteps) -> list[dict[str, Any]]:
    """Fork the ranks and wait for what they write."""
    ranks = steps.candidate.layout.ranks
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _be_rank(steps, rank, ranks, Path(folder))
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        texts = [Path(folder) / f"rank-{rank}.json" for rank in range(ranks)]
        return [
            json.loads(one.read_text()) if one.exists() else {"failed": "it died"} for one in texts
        ]


def _be_rank(steps: RealSteps, rank: int, ranks: int, folder: Path) -> None:
    """Take the steps and write what was seen; never returns."""
    try:
        _take_steps(steps, rank, ranks, folder)
    except BaseException:
        _tell(folder, rank, {"failed": traceback.format_exc()})
    os._exit(1)


def _tell(folder: Path, rank: int, told: dict[str, Any]) -> None:
    write_atomically(folder / f"rank-{rank}.json", json.dumps(told), durable=False)


def _take_steps(steps: RealSteps, rank: int, ranks: int, folder: Path) -> None:
    """Take the steps, tell and end, with everything still there: now and then gloo's threads are waited for in vain."""
    from datetime import timedelta

    import torch.distributed as dist

    from torchmuster.plan.probes.build_step import build_step
    from torchmuster.train.world import all_gather_object, join_world

    os.chdir(steps.work.folder)
    layout = steps.candidate.layout
    here = layout.shards if layout.shards > 1 else ranks  # as hybrid shards
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank % here),
        LOCAL_WORLD_SIZE=str(here),
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_COLLECTIVE_S),
    )
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):  # as FSDP calls them
        setattr(dist, name, _followed_by_a_pause(getattr(dist, name)))
    counter: Any = ctypes.CDLL(None)
    counter.tensor_bytes_peak.restype = counter.tensor_bytes_live.restype = ctypes.c_int64
    before = counter.tensor_bytes_live()
    peaks: list[int] = []
    with join_world("cpu") as world:
        built = build_step(steps.work, steps.candidate, world)
        for number in range(_MOST_STEPS):
            dist.barrier()
            counter.tensor_bytes_begin_again()
            outcome = built.train(number)
            peak = counter.tensor_bytes_peak()
            if peak < 0:
                raise RuntimeError("the counter had no room for all storages")
            if outcome.applied:
                peaks.append(peak - before)
            if all(all_gather_object(_are_enough(peaks, steps.candidate.strategy), world)):
                break
        if len(peaks) <= STEADY:
            raise RuntimeError(f"only {len(peaks)} of {_MOST_STEPS} steps were taken")
        _tell(folder, rank, {"peaks_bytes": peaks})
        until_s = time.monotonic() + _COLLECTIVE_S
        while len(list(folder.glob("rank-?.json"))) < ranks and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)  # the others may still read from this one
        os._exit(0)


def _are_enough(peaks: list[int], strategy: str) -> bool:
    steady = peaks[STEADY:]
    if strategy != "fsdp":  # only its collectives have buffers of their own
        return len(steady) > 0
    return len(steady) > 1 and steady.count(min(steady)) > 1


def _followed_by_a_pause(collective: Callable[..., Any]) -> Callable[..., Any]:
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        time.sleep(_PAUSE_S)
        return result

    return followed


if __name__ == "__main__":
    _serve()
