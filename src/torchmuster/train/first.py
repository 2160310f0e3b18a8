"""One rank does something first, the others then find it done: downloads, caches, built data.

::

    with first(world):
        dataset = load_and_cache()      # runs on every rank; on all but one the cache is warm

The others wait at the store that the group met at, not in a collective, so no collective's timeout ends
a long download.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import MusterError
from torchmuster.launch.probes.process_group import group_store
from torchmuster.train.world import World

_DONE = "done"
_LONGEST_PAUSE_S = 1.0


@contextmanager
def first(
    world: World, *, per: Literal["run", "node"] = "run", timeout_s: float = 6 * 3600.0
) -> Iterator[None]:
    """Let rank 0, or with ``per="node"`` the first rank of each node, run the body before the others.

    If it fails there, the others fail too, at once, with an error that names that rank and its error.
    All ranks must come here; inside the body they must not communicate.
    """
    if world.world_size == 1:
        yield
        return
    store = PrefixStore("torchmuster/first", group_store())
    visit = store.add(f"visits/{world.global_rank}", 1)  # all ranks come equally often
    # The host's name too: not every launcher numbers the nodes.
    node = f"{socket.gethostname()}/{world.node_rank}"
    key = f"{visit}" if per == "run" else f"{visit}/node {node}"
    if world.is_first if per == "run" else world.local_rank == 0:
        try:
            yield
        except BaseException as error:
            store.set(key, f"rank {world.global_rank}: {type(error).__name__}: {error}")
            raise
        store.set(key, _DONE)
    else:
        said = _wait(store, key, timeout_s)
        if said != _DONE:
            raise MusterError(
                f"what rank {world.global_rank} waited for failed on {said}",
                fix="mend what failed there; the other ranks were only waiting",
            )
        yield


def _wait(store: Store, key: str, timeout_s: float) -> str:
    """Ask from time to time: a wait at the store lets no signal through, and prints when it ends."""
    end = time.monotonic() + timeout_s
    pause_s = 0.01
    try:
        while not store.check([key]):
            if time.monotonic() > end:
                raise MusterError(
                    f"waited {timeout_s:g} s for the first rank, which is still not done",
                    fix="give first() a longer timeout_s, or look at what the first rank does",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return str(store.get(key).decode())
    except RuntimeError as error:  # torch's errors of stores
        raise MusterError(
            "the ranks' store is gone while waiting for the first rank",
            why=str(error).splitlines()[0],
            fix="look at rank 0's log: its process holds the store, and may have ended",
        ) from error
