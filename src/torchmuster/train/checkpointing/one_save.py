"""One save, from the state of a moment to a committed checkpoint or the reason why there is none."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from torchmuster.checkpoints.manifest import new_name
from torchmuster.checkpoints.retention import keep_newest
from torchmuster.checkpoints.store import Store
from torchmuster.errors import MusterError
from torchmuster.train.agreement import tell_all
from torchmuster.train.checkpointing.pace import Pace
from torchmuster.train.checkpointing.room import sweep_here
from torchmuster.train.checkpointing.staging import Staging
from torchmuster.train.checkpointing.tree import same_memory
from torchmuster.train.checkpointing.writer import Facts, Writer, at_once
from torchmuster.train.world import World


class OneSave:
    """What is known of a save, by the thread that trains and the one that writes."""

    def __init__(
        self,
        store: Store,
        world: World,
        group: dist.ProcessGroup,
        facts: Facts,
        *,
        keep: int,
        rest: Any,
        own: Any,
        tensors: dict[str, torch.Tensor],
        changing: Collection[str],
        staging: Staging | None,
        waited_s: float,
    ) -> None:
        """Take what changes before the next update: at once with ``staging``; else nothing changes meanwhile.

        Ranks may have different values of it, as each rank's BatchNorm has seen other samples. Those of rank 0 are
        the run's, so of what is not sharded only rank 0 writes it.
        """
        if not world.is_first:
            gone = {one for one in changing if not isinstance(tensors[one], DTensor)}
            tensors = {name: tensor for name, tensor in tensors.items() if name not in gone}
        self._store = store
        self._world = world
        self._group = group
        self._keep = keep
        self._rest = rest
        self._own = own
        self._tensors = tensors
        self._copies: dict[str, torch.Tensor] = {}
        if staging is not None:
            self._copies = {one: tensors[one].clone() for one in changing if one in tensors}
        self._staging = staging
        self.pace = Pace()
        if staging is None or world.device.type != "cpu":
            self.pace.hurry()  # a training waits for it, or computes elsewhere
        self._begun = time.perf_counter()
        self._ready = staging.ready() if staging is not None else None
        self.facts = facts
        self.staged = threading.Event()  # all that an update changes is copied
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        self.name = ""
        self.problem = ""
        self.size_bytes = 0
        self.waited_s = waited_s
        self.stall_s = 0.0
        self.took_s = 0.0

    def run(self) -> None:
        """Divide what is to be written among the ranks, copy it, write it, commit. Never raises."""
        try:
            self._write()
        except CheckpointException as error:  # which is not an Exception
            self.problem = _of_ranks(error)
            # Where that fails too, the next save that succeeds does it.
            sweep_here(self._store, self.name, self._world)
        except Exception as error:
            self.problem = _in_words(error)
        finally:
            self._tensors, self._copies = {}, {}
            self.took_s = time.perf_counter() - self._begun
            self.staged.set()
            self.done.set()

    def _write(self) -> None:
        is_first = self._world.is_first
        said = [new_name(self.facts.step), same_memory(self._tensors)] if is_first else None
        self.name, tied = tell_all(said, self._world, self._group)[0]
        tensors = {**self._tensors, **self._copies}
        metadata = state_dict_saver.save(
            {name: tensor for name, tensor in tensors.items() if name not in tied},
            storage_writer=Writer(
                self._store,
                self.name,
                self.facts,
                rank=self._world.global_rank,
                own=self._own,
                rest=self._rest,
                tied=tied,
                take=at_once if self._staging is None else self._take,
                rest_after=self.pace.rest,
            ),
            # All is flat already. What every rank has is divided among them by size.
            planner=DefaultSavePlanner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                dedup_save_to_lowest_rank=False,
            ),
            process_group=self._group,
        )
        self.size_bytes = metadata.storage_data
        if is_first:
            # What cannot be deleted now is tried again after the next save.
            with contextlib.suppress(OSError, MusterError):
                keep_newest(self._store, self._keep, just_committed=self.name)

    def _take(self, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
        assert self._staging is not None
        content = self._staging.take(tensors, self._ready)
        self._tensors, self._copies = {}, {}
        self.staged.set()
        return content


def _of_ranks(error: CheckpointException) -> str:
    failures = sorted(error.failures.items())
    rank, (first, _) = failures[0]
    more = len(failures) - 1
    others = f" (and {more} more ranks failed)" if more else ""
    return f"rank {rank}: {_in_words(first)}{others}"


def _in_words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if not isinstance(error, MusterError):
        text = f"{type(error).__name__}: {text.splitlines()[0]}"
    return "; ".join(text.splitlines())
