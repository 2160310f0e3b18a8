"""Notice ranks that train beside each other instead of together: they make steps, but have no process group.

A script that initializes torch.distributed only under some condition trains one unrelated model per rank. The example is
Hugging Face's ``Trainer`` on CPUs without ``use_cpu=True``. Scripts that communicate rarely have a process group, so they
are not meant.
"""

from collections.abc import Iterable

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.heartbeat import Heartbeat

_STEPS = 10
_WHY = "none of the ranks has a process group, so gradients are not exchanged: each rank trains a model of its own"
_FIX = (
    "call torch.distributed.init_process_group() and wrap the model (DistributedDataParallel); "
    "on CPUs Hugging Face's Trainer and Accelerate need use_cpu=True or cpu=True. "
    "Ignore this if the ranks are meant to be independent"
)


class UnconnectedRanks:
    """Receives the heartbeats of one attempt, and reports once that its ranks are not connected."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # of the ranks without a process group
        self._is_decided = False

    def hear(self, heartbeats: Iterable[Heartbeat]) -> Finding | None:
        """Take in heartbeats; return the finding as soon as two ranks have made enough steps by themselves."""
        if self._is_decided:
            return None
        for heartbeat in heartbeats:
            if heartbeat.groups or heartbeat.begun or heartbeat.waiting:
                self._is_decided = True
                return None
            if heartbeat.step is not None:
                self._steps[heartbeat.rank] = heartbeat.step
        count = sum(step >= _STEPS for step in self._steps.values())
        if count < 2:
            return None
        self._is_decided = True
        return Finding(
            name="ranks-not-connected",
            status=Status.WARNING,
            what=f"{count} ranks have each made {_STEPS} steps without any collective",
            why=_WHY,
            fix=_FIX,
        )
