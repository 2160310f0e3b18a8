"""A rank of a trial: a few steps with micro-batches of one size, and whether memory was enough for them.

Started by ``plan/proof/trials.py`` as ``python -m torchmuster.plan.probes.batch_trial REQUEST ANSWERS``.
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

# A collective is over for who waits for it before gloo's threads have let go of what they sent. That is less than
# a millisecond, on a machine that has one for them.
_LET_GO_WITHIN_S = 2.0


class Limited(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that an operation makes, until it is given back."""

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
        """Count a storage with the size it has now; more than the limit is refused."""
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
        """Say whether all that lives fits; what other threads are about to give back is waited for."""
        until_s = time.monotonic() + _LET_GO_WITHIN_S
        while self.live_bytes > limit_bytes:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    def _forget(self, key: int) -> None:
        # In two lines: other threads forget, too, and no call may come between reading the sum and writing it.
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[Limited]:
    """Let tensors made inside the ``with`` take no more than this; None only counts."""
    followed = Limited(limit_bytes)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP gives memory back by this
        result = resize(storage, size)
        followed.see(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        # DTensor works out shapes on tensors of the whole model's size, which take no memory.
        with paused_in_sharding_propagation(followed.pause, followed.go_on), followed:
            yield followed
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


# The optimiser's states are there after the first, and ddp has cut its buckets anew after the second.
STEPS = 3


def main(request: str, answers: str) -> None:
    """Be a rank of a trial: leave an answer in a folder, and fail where memory runs out."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=TrialRequest)
    with join_world(asked.device) as world:
        answer = try_batch(asked, world)
        leave_answer(answers, world.global_rank, msgspec.json.encode(answer).decode())
        if answer.ran_out:
            # The others wait in a collective for this rank: its end makes the launcher end them.
            sys.exit(f"rank {answer.rank} ran out of memory: {answer.words}")


def try_batch(asked: TrialRequest, world: World) -> RankTrial:
    """Train a few steps, and say how it went."""
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
