"""fp16's loss scale: large enough that small gradients do not vanish, small enough that none overflows.

torch's ``GradScaler`` does the work. It detects overflows identically on every rank: under DDP
because all ranks hold the same gradients, and for shards because ``unscale_`` takes the maximum
over the ranks for DTensors.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.world import World

_log = logging.getLogger("torchmuster.train")
_ENOUGH_STEPS = 100  # a run begins with some skipped steps, until the scale is right
_MANY_SKIPPED = 0.05


def refuse_half_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Reject trained 16-bit weights with a loss scale; frozen ones do not matter."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            raise Impossible(
                "precision fp16 was requested, but the trainable weights are "
                f"{str(parameter.dtype).removeprefix('torch.')}",
                why="the loss scale needs gradients in fp32: they cannot be unscaled in 16 bits",
                fix="keep the weights in fp32 (model.torch_dtype: float32), or use precision bf16 "
                "or fp32",
            )


class LossScale:
    """torch's ``scaler``, with counts of the skipped steps: it warns once if fp16 does not suffice."""

    def __init__(self, world: World, scaler: torch.amp.GradScaler | None = None) -> None:
        self.scaler = scaler or torch.amp.GradScaler(world.device.type)
        self._world = world
        self._steps = 0
        self._skipped = 0
        self._warned: set[str] = set()

    def count(self, scale: float, *, applied: bool) -> None:
        """Count a step that had this scale, and warn if fp16 does not suffice."""
        self._steps += 1
        if applied:
            return
        self._skipped += 1
        scale *= self.scaler.get_backoff_factor()
        if scale < 1.0:
            self._warn(
                "fp16: the loss scale has fallen below 1: gradients are not finite even "
                "unscaled, so a smaller scale cannot help; look for the cause in the data or the "
                "model, lower the learning rate, or use bf16 or fp32"
            )
        if self._steps >= _ENOUGH_STEPS and self._skipped > _MANY_SKIPPED * self._steps:
            self._warn(
                f"fp16: more than {_MANY_SKIPPED:.0%} of the steps were skipped because gradients "
                "overflowed; lower the learning rate, clip gradients, or use bf16 or fp32"
            )

    def _warn(self, text: str) -> None:
        if self._world.is_first and text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    def state(self) -> dict[str, Any]:
        """Return the scale and the counters, as plain JSON types."""
        return {
            "scaler": self.scaler.state_dict(),
            "steps": self._steps,
            "skipped": self._skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.scaler.load_state_dict(state["scaler"])
        self._steps, self._skipped = state["steps"], state["skipped"]
