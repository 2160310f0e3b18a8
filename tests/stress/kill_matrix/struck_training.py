"""The training that is struck: ``muster train`` builds its model and data from here.

It can be held at a moment, so that a kill hits it there. What saving does is seen by Python's audit events, so
that the product runs as it is.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stress.kill_matrix.moments import Moments

_PACE_S = 0.015  # of a step, so that kills find it at work
# So many steps of a process; then it waits for its kill, or it might have ended before that comes.
_STEPS_OF_A_PROCESS = 20
_WIDTH = 512
_SAMPLES = 640


class Net(nn.Module):
    """Large enough for two buckets of gradients, used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(_WIDTH, 8)
        self.first = nn.Linear(64, _WIDTH)
        self.middle = nn.Linear(_WIDTH, _WIDTH)
        self.dropout = nn.Dropout(0.1)
        self._moments: Moments | None = None
        self._steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._moments is None:
            self._moments = _begin()
        moments = self._moments
        hidden = torch.tanh(self.first(inputs))
        self._steps += 1
        if self._steps > _STEPS_OF_A_PROCESS:
            moments.await_kill()
        if not moments.hurry.exists():
            time.sleep(_PACE_S)
        moments.hold_at("forward")
        hidden = self.dropout(torch.tanh(self.middle(hidden)))
        outputs: torch.Tensor = self.last(hidden)
        if outputs.requires_grad:
            # Backward begins here: the other ranks soon wait for this one's gradients.
            outputs.register_hook(lambda _: moments.hold_at("collective"))  # type: ignore[no-untyped-call]
        return outputs


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random numbers, and a little noise by Python's generator of the rank that reads them."""

    def __init__(self) -> None:
        self._inputs = torch.randn(_SAMPLES, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs[number]
        return inputs + 0.01 * random.random(), inputs[:8].argmax()


def model() -> nn.Module:
    return Net()


def data() -> Samples:
    return Samples()


def _begin() -> Moments:
    """Let others know that this process trains, and watch its saving."""
    moments = Moments(Path.cwd())
    moments.begun.mkdir(exist_ok=True)
    (moments.begun / f"{os.environ['RANK']}.{os.getpid()}").touch()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "open"):
            _watch_saving(event, arguments, moments)

    sys.addaudithook(watch)
    return moments


def _watch_saving(event: str, arguments: tuple[Any, ...], moments: Moments) -> None:
    """Hold a save before a rank's tensors are written, before the marker does, or just after; or the last one."""
    if event == "os.rename":
        target = os.fsdecode(arguments[1])
        if target.endswith("/manifest.json"):
            moments.hold_at("commit")
        elif target.endswith("/checkpoints/final"):
            moments.hold_at("end")
        return
    opened, mode, *_ = arguments
    if not isinstance(opened, str | Path) or "/step-" not in str(opened):
        return
    if str(opened).endswith(".safetensors") and mode is not None and "w" in mode:
        moments.hold_at("save")
        return
    # The marker was just put there: its folder is opened to be made durable.
    if (folder := Path(opened)).is_dir() and (folder / "manifest.json").exists():
        moments.hold_at("committed")
