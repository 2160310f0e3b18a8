"""Which modules a training calls itself, and the time inside them.

In the first step every module is listened to, which costs; those that no other module called are the outermost, and
only they are listened to from then on.
"""

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchmuster.bench.probes.phases import Phases


class ForwardPhases:
    """Marks the calls of the outermost modules as the phase ``forward``."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._outermost: dict[int, nn.Module] = {}
        self._depth = 0
        self._listening: list[Any] = []

    def find(self) -> None:
        """Listen to every module."""
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
        """The modules that no other module called, as far as they were found."""
        return list(self._outermost.values())

    def settle(self) -> None:
        """Listen to the outermost ones only."""
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
