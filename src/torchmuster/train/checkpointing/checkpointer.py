"""``Checkpointer``: saves a training's state beside the training, and reads the newest good one back.

::

    with Checkpointer(open_store("checkpoints"), world, strategy="ddp") as checkpointer:
        ...
        loss.backward()
        checkpointer.before_update()  # a save that has just begun copies what the update changes
        optimizer.step()
        if step % 100 == 0:
            checkpointer.save(state, step=step, own=random_states.keep(world))

All ranks call every method, in the same order. What ranks have to agree on while the training goes on is said
in a process group of their own: in the training's, two threads would get each other's messages.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from torchmuster.checkpoints.retention import sweep_unfinished
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.verify import Found
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.train.checkpointing import loading, room
from torchmuster.train.checkpointing.choosing import for_all, heard_finding, newest_good_for_all
from torchmuster.train.checkpointing.host_bytes import refuse_unknown
from torchmuster.train.checkpointing.one_save import OneSave
from torchmuster.train.checkpointing.staging import Staging
from torchmuster.train.checkpointing.tree import same_memory, taken_apart
from torchmuster.train.checkpointing.writer import Facts
from torchmuster.train.world import World

Mode = Literal["auto", "async", "sync"]
# Longer than any file takes to be written: who is done waits for the others.
_LONGEST_SAVE = timedelta(hours=3)


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of a save. ``problem`` is the same on all ranks; "" if it is committed."""

    step: int
    name: str
    size_bytes: int  # of all ranks together; 0 if it failed
    stall_s: float  # that this rank's training waited for it
    waited_s: float  # the part of that in which the save before was not done yet
    took_s: float
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A state that was read. ``own`` is this rank's; None if the number of ranks was another one."""

    step: int
    state: dict[str, Any]
    own: dict[str, Any] | None
    found: Found


class Checkpointer:
    """Saves to a store and loads from it. One save is under way at a time."""

    def __init__(
        self,
        store: Store,
        world: World,
        *,
        strategy: str,
        keep: int = 3,
        mode: Mode = "auto",
        global_batch_size: int | None = None,
        buffers: Collection[str] | None = None,
        on_saved: Callable[[SaveReport], None] = lambda report: None,
    ) -> None:
        """Prepare to save; nothing is written yet.

        ``buffers`` names the model's tensors that a forward changes, of which rank 0's are saved; without it they
        are all that the optimiser does not train, frozen weights too.

        ``on_saved`` hears of every save, committed or failed, in the training's own thread: when one of the methods
        here is called next. Ranks hear of it at different steps, so it must not communicate.
        """
        if not dist.is_initialized():
            raise Impossible(
                "a Checkpointer was made before the ranks' group",
                fix="form it first: with join_world() as world: …",
            )
        self.store = store
        self.mode = _begin_with(mode)
        self._asked = mode
        self._world = world
        self._strategy = strategy
        self._global_batch_size = global_batch_size
        self._keep = keep
        self._buffers = buffers
        self._on_saved = on_saved
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_SAVE)
        self._staging = Staging(world.device)
        self._save: OneSave | None = None
        self._last: SaveReport | None = None

    def check_room(self, state: dict[str, Any]) -> list[Finding]:
        """Look for room in memory and on the disk before the first step; decide how "auto" saves.

        What saves that were cut off have left there is deleted: only one training saves to a place.
        """
        self.wait()
        size_bytes = room.size_of(taken_apart(state)[1].values())
        memory = room.fits_in_memory(size_bytes, self._world)
        lacks = for_all(lambda: "" if memory.value else memory.reason, self._world, self._group)
        findings = for_all(lambda: self._look_at_disk(size_bytes), self._world, self._group)[0]
        found = [heard_finding(one) for one in findings]
        if not any(one.status is Status.FAILURE for one in found):
            found += room.place_findings(self.store, self._world, self._group)
        lack = next(filter(None, lacks), "")
        if self._asked == "auto":
            self.mode = (
                Decision(value="sync", reason=f"the training waits for each save: {lack}")
                if lack
                else Decision(value="async", reason=f"saving goes on beside it: {memory.reason}")
            )
        elif lack and self._asked == "async":
            found.append(room.memory_finding(lack))
        return found

    def save(self, state: dict[str, Any], *, step: int, own: dict[str, Any]) -> None:
        """Save a state; returns when what changes before the next update is taken.

        Parameters and optimiser states are copied while the next forward and backward run, until
        :meth:`before_update`. ``own`` is this rank's own, as JSON types.
        """
        begun = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - begun
        rest, tensors = taken_apart(state)
        refuse_unknown(tensors)
        beside = self.mode.value == "async"
        save = OneSave(
            self.store,
            self._world,
            self._group,
            Facts(
                step=step,
                world_size=self._world.world_size,
                strategy=self._strategy,
                global_batch_size=self._global_batch_size,
            ),
            keep=self._keep,
            rest=rest,
            own=own,
            tensors=tensors,
            changing=_changing(state, tensors, self._buffers),
            staging=self._staging if beside else None,
            waited_s=waited_s,
        )
        self._save = save
        if beside:
            # A daemon: a training that has failed ends at once, whatever a store is waiting for.
            thread = threading.Thread(target=save.run, name="muster-saving", daemon=True)
            save.thread = thread
            thread.start()
            save.stall_s += time.perf_counter() - begun
        else:
            save.run()
            save.stall_s += time.perf_counter() - begun
            self._hear()

    def before_update(self) -> None:
        """Wait until all that an update changes is copied: the parameters and the optimiser's states."""
        save = self._save
        if save is None:
            return
        if not save.staged.is_set():
            begun = time.perf_counter()
            save.staged.wait()
            save.stall_s += time.perf_counter() - begun
        if save.done.is_set():
            self._hear()

    def wait(self) -> SaveReport | None:
        """Wait until the last save is committed or has failed; return what became of it."""
        if self._save is not None:
            self._save.pace.hurry()
            self._save.done.wait()
            self._hear()
        return self._last

    def load(self, state: dict[str, Any]) -> Loaded | None:
        """Read the newest good checkpoint into the tensors of ``state``; None if there is none.

        The tensors stay where they are and sharded as they are, whatever number of ranks wrote them. The state
        that is returned has them, and everything else as it was saved.
        """
        self.wait()
        found = newest_good_for_all(self.store, self._world, self._group)
        if found is None:
            return None
        read = loading.read_into(self.store, found, state, self._world, self._group)
        return Loaded(step=found.manifest.step, state=read.state, own=read.own, found=found)

    def close(self) -> None:
        """Wait for the last save and give back what was taken for saving."""
        self.wait()
        self._staging.release()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error others may be gone, and a save that waits for them would never end.
        if error is None:
            self.close()

    def _look_at_disk(self, size_bytes: int) -> list[dict[str, str]]:
        if not self._world.is_first:
            return []
        sweep_unfinished(self.store)
        return [
            one.as_json() for one in room.disk_findings(size_bytes, self.store, keep=self._keep)
        ]

    def _hear(self) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        if save.thread is not None:
            save.thread.join()
        self._last = SaveReport(
            step=save.facts.step,
            name=save.name,
            size_bytes=save.size_bytes,
            stall_s=save.stall_s,
            waited_s=save.waited_s,
            took_s=save.took_s,
            problem=save.problem,
        )
        self._on_saved(self._last)


def _begin_with(mode: Mode) -> Decision[str]:
    if mode == "auto":
        return Decision(value="async", reason="saving goes on beside the training")
    return Decision(value=mode, reason=f"mode {mode} was asked for")


def _changing(
    state: dict[str, Any], tensors: dict[str, torch.Tensor], buffers: Collection[str] | None
) -> list[str]:
    """Return the names of tensors that may change before the next update."""
    if buffers is None:
        groups = state.get("optimizer", {}).get("param_groups", ())
        trained = {f"model.{name}" for group in groups for name in group["params"]}
        tied = same_memory(tensors)
        late = {name for name in tensors if tied.get(name, name) in trained}
    else:
        early = {f"model.{name}" for name in buffers}
        late = {name for name in tensors if name.startswith("model.") and name not in early}
    return [name for name in tensors if name not in late and not name.startswith("optimizer.")]
