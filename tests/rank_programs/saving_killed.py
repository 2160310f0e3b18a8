"""A process that saves, and kills itself before one of its changes to files."""

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from torchmuster.train.checkpointing.checkpointer import Checkpointer
from torchmuster.train.world import join_world

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def save_and_die(folder: Path, resumed: Path, at_change: int) -> None:
    """Resume, then save twice, keeping one; SIGKILL comes before this change, if there are so many."""
    changes = itertools.count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in _CHANGES or (event == "open" and arguments[2] & _WRITING)
        if is_change and next(changes) == at_change:
            os.kill(os.getpid(), signal.SIGKILL)

    weight = torch.zeros(1000)
    state = {"model": {"weight": weight}}
    with join_world("cpu"), Checkpointer(folder, keep=1) as checkpointer:
        loaded = checkpointer.load(state)
        step = 0 if loaded is None else loaded.step
        assert weight.eq(step).all()
        with resumed.open("a") as stream:
            stream.write(f"{step}\n")
        sys.addaudithook(watch)
        for next_step in (step + 1, step + 2):
            weight.fill_(next_step)
            checkpointer.save(state, next_step)
            report = checkpointer.wait()
            assert report is not None
            assert report.problem is None, report.problem
