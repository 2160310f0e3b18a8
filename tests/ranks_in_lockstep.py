"""Several ranks of one process in lockstep threads, for what ranks tell each other through tell_all."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from made_up_worlds import made_up_world
from patience import GIVE_UP_S
from torchmuster.train.world import World

T = TypeVar("T")


def run_in_lockstep(ranks: int, program: Callable[[World], T]) -> list[T]:
    """Run a program as each of so many ranks, and return what each one returned."""
    said: list[Any] = [None] * ranks
    meeting = threading.Barrier(ranks, timeout=GIVE_UP_S)

    def tell_all(value: Any, world: World) -> list[Any]:
        said[world.global_rank] = json.dumps(value)
        meeting.wait()
        heard = [json.loads(one) for one in said]
        meeting.wait()
        return heard

    def run(rank: int) -> T:
        try:
            return program(made_up_world(rank, ranks))
        except BaseException:
            meeting.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as pool:
        patch.setattr("torchmuster.train.data.dataloader_adapter.all_gather_object", tell_all)
        return list(pool.map(run, range(ranks)))
