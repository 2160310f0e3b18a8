"""A heartbeat: what one rank is doing, reported by the rank itself and by its host.

A thread in each rank writes it about once a second (``rank/heartbeat.py``); the node agent adds process
information from the system and forwards it every two seconds. It does not use the process group, so ranks that
hang in a collective send it too.
"""

from typing import Annotated

import msgspec

# JSON has integers of any size; our sums, floats and file names do not.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class PendingCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank has started: the ``number``-th of its group, as on every rank of the group."""

    group: str
    number: Integer
    operation: str  # all_reduce, barrier, …
    shapes: str = ""  # of the inputs: [4, 5] [7]
    dtype: str = ""  # Float, BFloat16

    @property
    def text(self) -> str:
        """The call as text: ``all_reduce of Float [1024]``."""
        if not self.shapes:
            return self.operation
        return f"{self.operation} of " + f"{self.dtype} {self.shapes}".strip()


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is doing.

    The fields about collectives are expensive to collect: they are set only while the rank has made no progress for
    a few seconds.
    """

    rank: Integer
    pid: Integer
    beat: Integer  # increases as long as Python can run in it
    moves: Integer  # increases with any progress: a step, a phase, a collective started or finished
    step: Integer | None = None
    phase: str = (
        ""  # loading data, forward, backward, update, saving, evaluating, compiling; "": unknown
    )
    place: str = ""  # the innermost line of the user's own code: train.py:88 in step
    doing: str = ""  # all_reduce, barrier, time.sleep, DataLoader.__next__, backward, …
    waiting: bool = False  # what it is doing finishes only when other ranks join
    handles: tuple[
        str, ...
    ] = ()  # stop and warning signals that the script handles: SIGTERM, SIGUSR1
    groups: tuple[str, ...] = ()  # its process groups; (): unknown
    collectives: Integer | None = None  # called since the start, in all groups; None: not visible
    begun: dict[str, Integer] = {}  # the number of the last collective of each group; 0: none yet
    waits: tuple[PendingCollective, ...] = ()  # the oldest unfinished one of each group
    # Shares of the rank's time between the last two step log lines, from the trainer.
    data_share: float | None = None
    communication_share: float | None = None
    # Added by the node agent.
    state: str = ""  # process state letter: R, S, D, T (stopped), Z, X (gone); "" if unknown
    busy: float | None = None  # CPUs used by it and its children
    memory_bytes: Integer | None = None  # resident memory
    silent_s: float = 0.0  # seconds since its beat changed: Python cannot run in it
