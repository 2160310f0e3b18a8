"""Phase timing of a training run: every moment of a step belongs to the innermost phase."""

import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchmuster.bench.profile.recording import RecordedCollective, RecordedStep

_REST = ""
_UNMARKED = nullcontext()
_MOST_COLLECTIVES = 64  # recorded per step; enough to show the pattern
# Phases in which value reads are counted separately; elsewhere they belong to the phase.
_READING_SHOWS_IN = (_REST, "forward", "communication")


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
        self.first_at_s: dict[str, float] = {}
        self.last_end_at_s: dict[str, float] = {}
        self.collectives: list[RecordedCollective] = []
        self.gradient_ready_at_s: float | None = None
        self.waiting_s = 0.0
        self._switches = _switches()
        self._cpu_s = time.process_time()
        self.begun_at_s = self._since_s = self._clock()

    @property
    def now(self) -> str:
        """The innermost phase; empty if none is active."""
        return self._open[-1][0] if self._open else _REST

    def enter(self, phase: str) -> None:
        """Enter a phase; the enclosing one is paused."""
        mark = None
        if self.marks:
            mark = record_function(f"muster:{phase}")
            mark.__enter__()  # type: ignore[no-untyped-call]
        at_s = self._clock()
        self.seconds[self.now] += at_s - self._since_s
        self._since_s = at_s
        self.times[phase] += 1
        self.first_at_s.setdefault(phase, at_s)
        self._open.append((phase, mark))

    def leave(self) -> None:
        """Leave the innermost phase."""
        at_s = self._clock()
        phase, mark = self._open.pop()
        self.seconds[phase] += at_s - self._since_s
        self._since_s = self.last_end_at_s[phase] = at_s
        if mark is not None:
            mark.__exit__(None, None, None)

    def left_of(self, depth: int) -> None:
        """Leave all inner phases, after an exception."""
        while len(self._open) > depth:
            self.leave()

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._open)

    @property
    def reading_shows(self) -> bool:
        """Whether a value read now belongs to the script's own loop."""
        return self.now in _READING_SHOWS_IN

    def marked(self, name: str) -> AbstractContextManager[object]:
        """Mark the ``with`` block in the trace, if there is one."""
        return record_function(f"muster:{name}") if self.marks else _UNMARKED

    def read(self, seconds: float) -> None:
        """Count a value read that has just finished."""
        at_s = self._clock()
        self.seconds[self.now] += at_s - self._since_s - seconds
        self._since_s = at_s
        self.seconds["reads"] += seconds
        self.times["reads"] += 1

    def begin_wait(self) -> None:
        """Note that the loop may wait for data from now on; another call restarts."""
        self._waits = (self._clock(), self.seconds["data"])

    def end_wait(self) -> None:
        """Count the time since :meth:`begin_wait` as data, without what is already counted."""
        if self._waits is None:
            return
        at_s, (since_s, counted_s) = self._clock(), self._waits
        self._waits = None
        begun_s = max(since_s, self.begun_at_s)  # a step may have ended in between
        waited_s = at_s - begun_s - max(0.0, self.seconds["data"] - counted_s)
        self.seconds[self.now] += at_s - self._since_s - waited_s
        self._since_s = self.last_end_at_s["data"] = at_s
        self.seconds["data"] += waited_s

    def gradient_ready(self) -> None:
        """Note that another parameter has its gradient; the last one of a backward counts."""
        self.gradient_ready_at_s = self._clock()

    def backward_ended(self) -> None:
        """Record how long a backward waited after its last gradient."""
        ended_at_s = self.last_end_at_s["backward"]
        if self.gradient_ready_at_s is not None:
            self.waiting_s += max(0.0, ended_at_s - self.gradient_ready_at_s)

    def called(self, name: str, begun_at_s: float, size_bytes: int | None) -> None:
        """Record a call of torch.distributed that has just finished."""
        if len(self.collectives) < _MOST_COLLECTIVES:
            self.collectives.append(
                RecordedCollective(
                    name=name,
                    begun_at_s=begun_at_s,
                    ended_at_s=self._clock(),
                    size_bytes=size_bytes,
                )
            )

    def end(self, number: int, *, profiled: bool, memory_bytes: int | None) -> RecordedStep:
        """Return the step that has just ended."""
        at_s = self._clock()
        seconds = self.seconds
        return RecordedStep(
            number=number,
            profiled=profiled,
            begun_at_s=self.begun_at_s,
            took_s=at_s - self.begun_at_s,
            data_s=seconds["data"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            waiting_s=self.waiting_s,
            communication_s=seconds["communication"],
            optimizer_s=seconds["optimizer"],
            save_s=seconds["save"],
            saves=self.times["save"],
            reads_s=seconds["reads"],
            reads=self.times["reads"],
            micro_batches=self.times["backward"],
            data_ended_at_s=self.last_end_at_s.get("data"),
            forward_begun_at_s=self.first_at_s.get("forward"),
            backward_begun_at_s=self.first_at_s.get("backward"),
            gradients_ready_at_s=self.gradient_ready_at_s,
            backward_ended_at_s=self.last_end_at_s.get("backward"),
            cpu_s=time.process_time() - self._cpu_s,
            switches=_switches() - self._switches,
            memory_bytes=memory_bytes,
            collectives=tuple(self.collectives),
        )


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


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
        found = first_tensor(part)
        if found is not None:
            return found
    return None


class ForwardPhases:
    """Marks the calls of the outermost modules as the phase ``forward``."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._outermost: dict[int, nn.Module] = {}
        self._depth = 0
        self._listening: list[Any] = []

    def find(self) -> None:
        """Hook every module."""
        self._listening = [
            register_module_forward_pre_hook(self._enter_any),
            register_module_forward_hook(self._leave_any, always_call=True),
        ]

    def _enter_any(self, module: nn.Module, *_: Any) -> None:
        if not self._depth and self._phases.now == "":
            self._outermost[id(module)] = module
        self._depth += 1

    def _leave_any(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    @property
    def outermost(self) -> list[nn.Module]:
        """The outermost modules found so far."""
        return list(self._outermost.values())

    def settle(self) -> None:
        """Hook only the outermost modules."""
        for one in self._listening:
            one.remove()
        for module in self._outermost.values():
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        if self._phases.now in ("", "forward"):
            self._phases.enter("forward")

    def _leave(self, *_: Any) -> None:
        if self._phases.now == "forward":
            self._phases.leave()
