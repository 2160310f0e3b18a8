"""A rank of a trial: run a few steps with one micro-batch size and report whether they fit.

``plan/proof/trials.py`` starts it as
``python -m torchmuster.plan.probes.batch_trial REQUEST ANSWERS``.
"""

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.plan.probes.build_step import build_step
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.plan.proof.trials import RankTrial, TrialRequest
from torchmuster.plan.torch_private import paused_in_sharding_propagation, storage_id, tree_leaves
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.train.torch_private import TorchDispatchMode
from torchmuster.train.world import World, join_world
from torchmuster.units import format_bytes

# A collective returns before gloo's threads have freed their send buffers. They need less than a
# millisecond if a core is free.
_LET_GO_WITHIN_S = 2.0


class Limited(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track every storage that an operation creates until it is freed."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        self.live_bytes = 0
        self._paused = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                if local.device.type != "meta":
                    self.see(local.untyped_storage())
        return result

    def pause(self) -> None:
        """Count nothing until :meth:`go_on`."""
        self._paused += 1

    def go_on(self) -> None:
        """Count again."""
        self._paused -= 1

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its current size; raise if the limit is exceeded."""
        key, size = storage_id(storage), storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        asked = size - self._sizes.get(key, 0)
        self.live_bytes += asked
        self._sizes[key] = size
        if self._limit_bytes is not None and not self._has_room(self._limit_bytes):
            in_use = self.live_bytes - asked
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {asked} bytes. This rank may use "
                f"{format_bytes(self._limit_bytes)}, of which {format_bytes(in_use)} are in use"
            )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _has_room(self, limit_bytes: int) -> bool:
        """Return whether all live storages fit, after other threads had time to free theirs."""
        until_s = time.monotonic() + _LET_GO_WITHIN_S
        while self.live_bytes > limit_bytes:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    def _forget(self, key: int) -> None:
        # In two lines: other threads also do this, and no call may come between read and write.
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[Limited]:
    """Limit the memory of tensors created inside the ``with``; None only counts."""
    followed = Limited(limit_bytes)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees memory with this
        result = resize(storage, size)
        followed.see(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        # DTensor computes shapes on full-size tensors, which take no memory.
        with paused_in_sharding_propagation(followed.pause, followed.go_on), followed:
            yield followed
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


# The optimizer's states exist after the first step, and ddp rebuilds its buckets in the second.
STEPS = 3


def main(request: str, answers: str) -> None:
    """Run as a rank of a trial: write the answer into a folder, and exit if memory runs out."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=TrialRequest)
    with join_world(asked.device) as world:
        answer = try_batch(asked, world)
        leave_answer(answers, world.global_rank, msgspec.json.encode(answer).decode())
        if answer.ran_out:
            # The others wait in a collective: the launcher stops them when this rank exits.
            sys.exit(f"rank {answer.rank} ran out of memory: {answer.words}")


def try_batch(asked: TrialRequest, world: World) -> RankTrial:
    """Train a few steps and return the result."""
    rank = world.global_rank
    limit = asked.limits_bytes[rank] if asked.limits_bytes is not None else None
    on_cpu = world.device.type == "cpu"
    with limited(limit) as followed:
        try:
            built = build_step(asked.work, asked.candidate, world)
            for number in range(STEPS):
                built.train(number)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return RankTrial(rank=rank, ran_out=True, limit_bytes=limit, words=str(error))
    return RankTrial(
        rank=rank,
        ran_out=False,
        peak_bytes=followed.peak_bytes if on_cpu else _device_peak(world.device),
        limit_bytes=limit if on_cpu else _device_memory(world.device),
    )


def _device_peak(device: torch.device) -> int:
    return torch.accelerator.max_memory_reserved(device)


def _device_memory(device: torch.device) -> int:
    return torch.accelerator.get_memory_info(device)[1]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        freeze_objects()
