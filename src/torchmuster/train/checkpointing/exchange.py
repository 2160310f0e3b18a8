"""Exchange small values between all ranks through the job's store, also from a background thread.

A process group of its own for saves would connect every rank with every other. Here each rank sends one message to the
leader of its 64 ranks, the leaders send one each to rank 0, and all ranks wait for one answer: rank 0 reads
N/64 + 64 messages, and no rank receives more than the answer.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.probes.process_group import group_store
from torchmuster.train.stop_request import process_address, process_died
from torchmuster.train.world import World, is_simulated

T = TypeVar("T")

_GROUP = 64  # ranks per leader
# Longer than any file takes to write: ranks that are done wait for the others.
_LONGEST_WAIT = timedelta(hours=3)
_LONGEST_CLOSE_S = 30.0  # a rank that failed does not close
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25
_LIVENESS_EVERY_S = 1.0


class RankFailure(MusterError):
    """A function failed on some rank. All ranks raise this, with the same text."""


class RankExchange:
    """Runs a function on all ranks and combines the results on rank 0.

    All ranks call :meth:`run` in the same order, each from one thread at a time. ``store`` is a connection that nothing
    else uses, because a wait blocks all other uses of a connection; its keys must be new. None: there are no
    other ranks, or all of them equal this one.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._number = 0
        self._closed = False
        if store is not None:
            store.set(f"process/{rank}", process_address())

    @classmethod
    def of_job(cls, world: World) -> "RankExchange":
        """Open a connection to the store of the process group; all ranks call this.

        They agree on a prefix for the keys: a restarted job may find those of its predecessor.
        """
        store: Store | None = None
        if world.world_size > 1 and not is_simulated(world):
            token = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=world.device)
            dist.broadcast(token, 0)
            prefix = f"torchmuster/exchange/{bytes(token.tolist()).hex()}"
            clone = cast(Any, group_store()).clone()  # torch's type stubs lack it
            store = PrefixStore(prefix, clone)
        return cls(world.global_rank, world.world_size, store)

    def run(self, work: Callable[[], T], combine: Callable[[list[T]], Any]) -> Any:
        """Call ``work`` on each rank, and ``combine`` with all results on rank 0; return its result.

        Results are JSON types. If a function fails on any rank, all ranks raise the same error.
        """
        if self._closed:
            raise Impossible(
                "this Checkpointer is closed",
                why="the ranks can no longer exchange what they have written",
                fix="save before close(), or before the end of the with block",
            )
        value, problem = _tried(work)
        text = json.dumps([value, problem])
        if self._store is None:
            answer = _combined([json.loads(text)] * self._world_size, combine)
        else:
            answer = self._through_store(self._store, text, combine)
        combined, problem = json.loads(answer)
        if problem:
            raise RankFailure(problem)
        return combined

    def close(self) -> None:
        """Delete this exchange's keys and close the connection; all ranks call this.

        Rank 0 waits until all have read the last answer: its process may host the store, and exit.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # torch's store errors: rank 0 has exited
                self._gather(self._store, "closed", '""', _LONGEST_CLOSE_S)
                if self._rank == 0:
                    self._store.delete_key(f"{self._number - 1}/answer")
                self._store.delete_key(f"process/{self._rank}")
            self._store = None
        self._closed = True

    def _through_store(self, store: Store, text: str, combine: Callable[[list[Any]], Any]) -> str:
        number, self._number = self._number, self._number + 1
        try:
            messages = self._gather(store, f"{number}", text, _LONGEST_WAIT.total_seconds())
            if messages is None:
                return wait_for_answer(store, f"{number}/answer")
            answer = _combined(messages, combine)
            store.set(f"{number}/answer", answer)
            # All ranks have sent a message since, so they have read the answer before.
            store.delete_key(f"{number - 1}/answer")
            return answer
        except RuntimeError as error:  # torch's store errors
            raise MusterError(
                "the ranks' store became unreachable",
                why=str(error).splitlines()[0],
                fix="check rank 0's log: its process hosts the store, and may have exited",
            ) from error

    def _gather(self, store: Store, folder: str, text: str, limit_s: float) -> list[Any] | None:
        """Send a message to rank 0, through the leader of the group; there, return all messages."""
        rank, size = self._rank, self._world_size
        if rank % _GROUP:
            store.set(f"{folder}/{rank}", text)
            return None
        members = range(rank + 1, min(rank + _GROUP, size))
        texts = [text, *self.collect_texts(store, folder, members, limit_s)]
        if rank:
            store.set(f"{folder}/of/{rank}", f"[{','.join(texts)}]")
            return None
        messages = [json.loads(one) for one in texts]
        for group in self.collect_texts(
            store, f"{folder}/of", range(_GROUP, size, _GROUP), limit_s
        ):
            messages += json.loads(group)
        return messages

    def collect_texts(
        self, store: Store, folder: str, ranks: Sequence[int], limit_s: float
    ) -> list[str]:
        """Return the messages of ranks, and delete them; for a dead rank, one that says so."""
        texts: dict[int, str] = {}
        begun = looked = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        while missing := [rank for rank in ranks if rank not in texts]:
            if store.check([f"{folder}/{rank}" for rank in missing]):
                texts |= _taken(store, folder, missing)
                continue
            now = time.monotonic()
            if now - looked > _LIVENESS_EVERY_S:
                looked = now
                overdue = now - begun > limit_s
                gone = [rank for rank in missing if overdue or self._died(store, rank)]
                # One that has exited may have sent its message before.
                sent = [rank for rank in gone if store.check([f"{folder}/{rank}"])]
                texts |= _taken(store, folder, sent)
                for rank in set(gone) - set(sent):
                    texts[rank] = self._no_message(rank, folder)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [texts[rank] for rank in ranks]

    def _died(self, store: Store, rank: int) -> bool:
        key = f"process/{rank}"
        return bool(store.check([key])) and process_died(store.get(key).decode())

    def _no_message(self, rank: int, folder: str) -> str:
        message: list[Any] = [None, "its process has exited, or did not answer"]
        if folder.endswith("/of"):  # the messages of its group are lost with it
            message = [message] * min(_GROUP, self._world_size - rank)
        return json.dumps(message)


def wait_for_answer(store: Store, key: str) -> str:
    """Return rank 0's answer. The hang monitor knows this function and ``collect_texts`` by name."""
    store.wait([key], _LONGEST_WAIT)
    return store.get(key).decode()


def _taken(store: Store, folder: str, ranks: Sequence[int]) -> dict[int, str]:
    keys = [f"{folder}/{rank}" for rank in ranks]
    if not keys:
        return {}
    has_multi_get = cast(Any, store).has_extended_api()  # torch's type stubs lack it
    found = store.multi_get(keys) if has_multi_get else [store.get(key) for key in keys]
    for key in keys:
        store.delete_key(key)
    return {rank: bytes(one).decode() for rank, one in zip(ranks, found, strict=True)}


def _combined(messages: list[Any], combine: Callable[[list[Any]], Any]) -> str:
    """Return the answer to all ranks: the combined result and "", or None and the problem."""
    failed = [(rank, problem) for rank, (_, problem) in enumerate(messages) if problem]
    combined = None
    if not failed:
        combined, problem = _tried(lambda: combine([value for value, _ in messages]))
        failed = [(0, problem)] if problem else []
    if not failed:
        return json.dumps([combined, ""])
    rank, problem = failed[0]
    more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    return json.dumps([None, f"rank {rank}: {problem}{more}"])


def _tried(work: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return work(), ""
    except Exception as error:
        return None, error_text(error)


def error_text(error: BaseException) -> str:
    """Return an error in one line."""
    text = str(error) or type(error).__name__
    if not isinstance(error, MusterError):
        text = f"{type(error).__name__}: {text.splitlines()[0]}"
    return "; ".join(text.splitlines())


def first_of(values: list[T]) -> T:
    """Combine the results of all ranks to that of rank 0."""
    return values[0]


def nothing(values: list[Any]) -> None:
    """Combine the results of all ranks to nothing: only their errors matter."""
