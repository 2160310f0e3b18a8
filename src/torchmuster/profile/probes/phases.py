"""Phase timing of a training run: every moment of a step belongs to the innermost phase."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchmuster.profile.facts import Step

_REST = ""
LOWER_DTYPES = (torch.bfloat16, torch.float16)
# Phases in which value reads are counted separately; elsewhere they belong to the phase.
_READS_COUNT_IN = (_REST, "forward", "communication")


class Phases:
    """Sums the time of each phase in the current step; used only by the training thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.marks = False  # whether phases are marked in the profiler's trace as well
        self._open: list[tuple[str, record_function | None]] = []
        self._waits: tuple[float, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.times: Counter[str] = Counter()
        self.gradient_ready_at_s = math.inf  # the last one of the backward
        self.waiting_s = 0.0
        self._begun_at_s = self._since_s = self._clock()

    @property
    def current(self) -> str:
        """The innermost phase; empty if none is active."""
        return self._open[-1][0] if self._open else _REST

    @property
    def reads_count(self) -> bool:
        """Whether a value read belongs to the script's own loop."""
        return self.current in _READS_COUNT_IN

    def _add(self, phase: str, without_s: float = 0.0) -> float:
        at_s = self._clock()
        self.seconds[phase] += at_s - self._since_s - without_s
        self._since_s = at_s
        return at_s

    def enter(self, phase: str) -> None:
        """Enter a phase; the enclosing one is paused."""
        mark = None
        if self.marks:
            mark = record_function(f"muster:{phase}")
            mark.__enter__()  # type: ignore[no-untyped-call]
        self._add(self.current)
        self.times[phase] += 1
        self._open.append((phase, mark))

    def leave(self) -> float:
        """Leave the innermost phase; return the time."""
        phase, mark = self._open.pop()
        at_s = self._add(phase)
        if mark is not None:
            mark.__exit__(None, None, None)
        return at_s

    def leave_all(self, depth: int = 0) -> None:
        """Leave all phases inside of a depth, after an exception."""
        while len(self._open) > depth:
            self.leave()

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Count the ``with`` block as a phase."""
        depth = len(self._open)
        self.enter(phase)
        try:
            yield
        finally:
            self.leave_all(depth)

    def begin_wait(self) -> None:
        """Note that the loop may wait for data from here on; another call restarts."""
        self._waits = (self._clock(), self.seconds["data"])

    def end_wait(self) -> None:
        """Count the time since :meth:`begin_wait` as data, without what is already counted."""
        if self._waits is None:
            return
        since_s, counted_s = self._waits
        self._waits = None
        begun_s = max(since_s, self._begun_at_s)  # a step may have ended in between
        waited_s = self._clock() - begun_s - max(0.0, self.seconds["data"] - counted_s)
        self._add(self.current, waited_s)
        self.seconds["data"] += waited_s

    def gradient_ready(self) -> None:
        """Note that another parameter has its gradient; the last one of a backward counts."""
        self.gradient_ready_at_s = self._clock()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the ``with`` block as a backward; the time after its last gradient is waiting."""
        self.gradient_ready_at_s = math.inf
        with self.inside("backward"):
            yield
        self.waiting_s += max(0.0, self._since_s - self.gradient_ready_at_s)

    def end(self, number: int, *, profiled: bool) -> Step:
        """Return the step that has just ended."""
        return Step(
            number=number,
            profiled=profiled,
            took_s=self._clock() - self._begun_at_s,
            seconds={phase: spent_s for phase, spent_s in self.seconds.items() if phase != _REST},
            times=dict(self.times),
            waiting_s=self.waiting_s,
        )


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of a batch of any structure."""
    if isinstance(batch, torch.Tensor):
        return batch
    parts: Any = ()
    if isinstance(batch, dict):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    for part in parts:
        tensor = first_tensor(part)
        if tensor is not None:
            return tensor
    return None


class ForwardPhases:
    """Marks the calls of the outermost modules as the phase ``forward``.

    Every module is hooked in the warm-up steps, which also shows the dtype of computation.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._depth = 0
        self.outermost: dict[int, nn.Module] = {}
        self.lower_dtype: torch.dtype | None = None  # of 16 bits, by autocast or FSDP; None: none
        self._hooks: list[Any] = []

    def find(self) -> None:
        """Hook every module."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter_any),
            register_module_forward_hook(self._leave_any, always_call=True),
        ]

    def _enter_any(self, module: nn.Module, arguments: Any) -> None:
        if not self._depth and self._phases.current == _REST:
            self.outermost[id(module)] = module
        self._depth += 1
        batch = first_tensor(arguments)
        if batch is None:
            return
        if batch.dtype in LOWER_DTYPES:
            self.lower_dtype = batch.dtype
        elif torch.is_autocast_enabled(batch.device.type):
            self.lower_dtype = torch.get_autocast_dtype(batch.device.type)

    def _leave_any(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def settle(self) -> None:
        """Hook only the outermost modules."""
        for hook in self._hooks:
            hook.remove()
        for module in self.outermost.values():
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        if self._phases.current in (_REST, "forward"):
            self._phases.enter("forward")

    def _leave(self, *_: Any) -> None:
        if self._phases.current == "forward":
            self._phases.leave()
