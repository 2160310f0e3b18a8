"""Real gloo ranks for tests, without a launcher: forked from a process that has imported torch.

A pytest plugin with the fixture ``run_ranks``: ``run_ranks(program, 4, …)`` calls ``program(world, …)`` on 4 ranks at once and returns what each one
returned. A program is a function of a module in ``tests/rank_programs``: ranks find it by its name.
"""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from patience import GIVE_UP_S

T = TypeVar("T")
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # a second of work that the first optimizer of each rank would do
    "torchmuster.train.trainer",
    "torchmuster.train.data.stream",
]


class RunRanks(Protocol):
    """Runs a program on so many ranks and returns what each one returned."""

    def __call__(
        self, program: Callable[..., T], ranks: int, *arguments: Any, within_s: float = ...
    ) -> list[T]: ...


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Start the process that ranks are forked from; it lives until the tests end."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    return _run_ranks


def _run_ranks(
    program: Callable[..., T], ranks: int, *arguments: Any, within_s: float = GIVE_UP_S
) -> list[T]:
    """Run a program on so many ranks; the first failure ends all and is raised with its traceback."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_be_rank, args=(program, rank, ranks, folder, theirs, arguments)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _answers(pipes, within_s)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _answers(pipes: list[Connection], within_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = [pipe for place, pipe in enumerate(pipes) if place not in answers]
        ready = wait(waiting, timeout=within_s)
        if not ready:
            silent = [place for place in range(len(pipes)) if place not in answers]
            raise TimeoutError(f"ranks {silent} did not end within {within_s:g} s")
        for pipe in ready:
            place = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, answer = pickle.loads(pipes[place].recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {place} died") from None
            if not good:
                raise AssertionError(f"rank {place} failed:\n{answer}")
            answers[place] = answer
    return [answers[place] for place in range(len(pipes))]


def _be_rank(
    program: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: str,
    pipe: Connection,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from torchmuster.train import reports
    from torchmuster.train.world import join_world

    reports._SILENT_AT_MOST_S = 1e9  # when lines come must not depend on how busy the machine is
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=ranks
        )
        with join_world() as world:
            answer = program(world, *arguments)
        _send(pipe, True, answer)
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        _send(pipe, False, traceback.format_exc())


def _send(pipe: Connection, good: bool, answer: object) -> None:
    # Tensors by value: a pipe's own way is to share memory, which is gone when the rank is.
    pipe.send_bytes(pickle.dumps((good, answer)))
