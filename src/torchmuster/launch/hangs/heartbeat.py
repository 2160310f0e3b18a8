"""A heartbeat: what one rank is doing, as it says itself and as its machine sees it.

A thread in each rank writes it down about once a second (``rank_heartbeat.py``); the node agent adds what the system
knows of the process and sends it on every two seconds. It does not pass through the process group, so it
also comes from ranks that hang in it.
"""

from typing import Annotated

import msgspec

# JSON has integers of any size; sums, floats and file names of ours do not.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class PendingCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank has begun: the ``number``-th of its group, as on every rank of the group."""

    group: str
    number: Integer
    operation: str  # all_reduce, barrier, …
    shapes: str = ""  # of what goes in: [4, 5] [7]
    dtype: str = ""  # Float, BFloat16


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is doing.

    What is said of collectives costs more to find out than the rest: it is there only while the rank has
    not moved for a few seconds.
    """

    rank: Integer
    pid: Integer
    beat: Integer  # counts up for as long as Python can run in it
    moves: Integer  # counts up with every sign of progress: a step, a phase, a collective begun or done
    step: Integer | None = None
    phase: str = ""  # loading data, forward, backward, update, saving, evaluating, compiling, planning; "": unknown
    place: str = ""  # the innermost line of the user's own code: train.py:88 in step
    doing: str = ""  # all_reduce, barrier, time.sleep, DataLoader.__next__, backward, …
    waiting: bool = False  # what it is doing ends only when other ranks come to it
    groups: tuple[str, ...] = ()  # of ranks, in which it is; (): not known
    begun: dict[str, Integer] = {}  # the number of the last collective of each group; 0: none yet
    waits: tuple[PendingCollective, ...] = ()  # the oldest of each group that is not done
    # Shares of the rank's time between the last two lines about steps, as the trainer knows them.
    data_share: float | None = None
    communication_share: float | None = None
    # Added by the node agent.
    state: str = (
        ""  # the system's letter: R, S, D, T (stopped), Z, X (gone); "" where it is not known
    )
    busy: float | None = None  # processors kept busy by it and its children
    memory_bytes: Integer | None = None  # of it in RAM
    silent_s: float = 0.0  # how long its beat has not changed: Python cannot run in it
