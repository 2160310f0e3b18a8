"""Notice ranks that train beside each other instead of together: they make steps, but call no collective.

A script that initializes torch.distributed only under some condition, or does not wrap its model, trains one unrelated model
per rank. The example is Hugging Face's ``Trainer`` on CPUs without ``use_cpu=True``. Scripts that communicate rarely are
not meant: one collective since the start is enough, and a rank with a process group has more time for it.
"""

from collections.abc import Iterable

from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.heartbeat import Heartbeat

_STEPS_WITHOUT_GROUP = 10
_STEPS_WITH_GROUP = 50
_WHY = "gradients are not exchanged: each rank trains a model of its own"
_FIX = (
    "call torch.distributed.init_process_group() and wrap the model (DistributedDataParallel); "
    "on CPUs Hugging Face's Trainer and Accelerate need use_cpu=True or cpu=True. "
    "Ignore this if the ranks are meant to be independent"
)


class UnconnectedRanks:
    """Receives the heartbeats of one attempt, and reports once that its ranks are not connected."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # of the ranks with enough steps
        self._is_decided = False

    def hear(self, heartbeats: Iterable[Heartbeat]) -> Finding | None:
        """Take in heartbeats; return the finding as soon as two ranks have made enough steps by themselves."""
        if self._is_decided:
            return None
        for heartbeat in heartbeats:
            if heartbeat.collectives or any(heartbeat.begun.values()):
                self._is_decided = True
                return None
            if heartbeat.groups and heartbeat.collectives is None:
                continue  # not visible
            needed = _STEPS_WITH_GROUP if heartbeat.groups else _STEPS_WITHOUT_GROUP
            if heartbeat.step is not None and heartbeat.step >= needed:
                self._steps[heartbeat.rank] = heartbeat.step
        if len(self._steps) < 2:
            return None
        self._is_decided = True
        return Finding(
            name="ranks-not-connected",
            status=Status.WARNING,
            what=f"{len(self._steps)} ranks have each made {min(self._steps.values())} steps without any collective",
            why=_WHY,
            fix=_FIX,
        )
