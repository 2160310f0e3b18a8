"""Measure how long a step waits for communication that does not overlap with compute.

Communication that overlaps with the backward costs nothing; only the rest counts here. It includes
waiting for slower ranks. The result is None where it cannot be measured cheaply and exactly.
"""

import time
from typing import Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train.torch_private import ddp_measurements, let_ddp_measure
from torchmuster.train.world import World


class Communication(Protocol):
    """Measures communication of one model."""

    def exposed_s(self, steps: int) -> float | None:
        """Return the seconds that the last N steps waited, since the previous call."""
        ...


def communication_of(model: nn.Module, world: World) -> Communication:
    """Return a meter for this model's communication."""
    if world.world_size == 1:
        return _NoCommunication()
    if isinstance(model, DistributedDataParallel):
        # On an accelerator, a measured step waits for the device: torch's own rate there.
        every = 10 if world.device.type == "cpu" else 100
        return _DdpTimes(model, every) if let_ddp_measure(model, every=every) else _Unknown()
    return _Unknown()


class _NoCommunication:
    def exposed_s(self, steps: int) -> float | None:
        return 0.0


class _Unknown:
    """Measures nothing: how long FSDP waits, only a profiler sees."""

    def exposed_s(self, steps: int) -> float | None:
        return None


class _DdpTimes:
    """Reads DDP's own measurements, from its first 10 iterations and every Nth later.

    Timing from outside would need a hook on every parameter.
    """

    _ENOUGH = 5  # a single iteration may be an outlier
    _ASK_EVERY_S = (
        1.0  # seconds between reads: DDP returns a large table, the slowest part of a step line
    )

    def __init__(self, model: DistributedDataParallel, every: int) -> None:
        self._model = model
        self._every = every
        self._measured = 0  # iterations that DDP has measured so far
        self._sum_ns = 0  # their waiting time
        self._mean_s: float | None = None
        self._asked_s = 0.0

    def exposed_s(self, steps: int) -> float | None:
        now_s = time.monotonic()
        if self._mean_s is not None and now_s - self._asked_s < self._ASK_EVERY_S:
            return self._mean_s * steps
        self._asked_s = now_s
        said = ddp_measurements(self._model)
        iteration = int(said.get("iteration", 0))
        later = iteration // self._every - 10 // self._every
        measured = iteration if iteration <= 10 else 10 + later
        if "avg_backward_comm_time" not in said:
            return None
        if measured - self._measured >= self._ENOUGH:
            # DDP reports the average since the start; the difference of sums covers the steps
            # since.
            hidden_ns = int(said["avg_backward_compute_comm_overlap_time"])
            sum_ns = (int(said["avg_backward_comm_time"]) - hidden_ns) * measured
            self._mean_s = max(0.0, (sum_ns - self._sum_ns) / (measured - self._measured) / 1e9)
            self._measured, self._sum_ns = measured, sum_ns
        return None if self._mean_s is None else self._mean_s * steps
