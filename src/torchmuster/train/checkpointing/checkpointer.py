"""``Checkpointer``: saves the training state in the background, and loads the newest good one.

::

    with Checkpointer(open_store("checkpoints"), world, strategy="ddp") as checkpointer:
        ...
        loss.backward()
        checkpointer.before_update()  # waits until a save has copied what the update changes
        optimizer.step()
        if step % 100 == 0:
            checkpointer.save(state, step=step, own=random_states.keep(world))

All ranks call every method, in the same order. Each rank plans its part of a save itself; the ranks exchange only the
checkpoint's name and the records of their files, through the job's store (:class:`RankExchange`).
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchmuster.checkpoints.manifest import new_name
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.verify import NewestCheckpoint, keep_newest, sweep_unfinished
from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch.probes.process_group import use_device
from torchmuster.train.checkpointing import disk_check, loading
from torchmuster.train.checkpointing.disk_check import remove_unfinished
from torchmuster.train.checkpointing.exchange import (
    RankExchange,
    RankFailure,
    error_text,
    first_of,
)
from torchmuster.train.checkpointing.flatten import flatten, shared_tensors
from torchmuster.train.checkpointing.loading import finding_of_rank, newest_valid_checkpoint
from torchmuster.train.checkpointing.pace import Pace
from torchmuster.train.checkpointing.planning import (
    SavePlan,
    assign_writers,
    holdings_of,
    layout_digest,
    plan_save,
)
from torchmuster.train.checkpointing.storage import (
    WriteFacts,
    byte_pieces_of,
    commit_save,
    refuse_unknown_dtype,
    unstaged_bytes,
    write_rank_files,
)
from torchmuster.train.world import World
from torchmuster.units import GiB, MiB

_LARGEST_BLOCK, _SMALLEST_BLOCK = GiB, MiB


def pinned_blocks(size_bytes: int) -> list[int]:
    """Return the sizes of blocks of pinned memory that hold ``size_bytes``, rounded up to 1 MiB.

    All are powers of two, because torch rounds each pinned allocation up to one.
    """
    left = -(-size_bytes // _SMALLEST_BLOCK) * _SMALLEST_BLOCK
    blocks, block = [], _LARGEST_BLOCK
    while left:
        count, left = divmod(left, block)
        blocks += [block] * count
        block //= 2
    return blocks


class Staging:
    """Host memory of the size that a rank writes. Used by one save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._blocks: list[torch.Tensor] = []
        self._stream: torch.Stream | None = None

    def ready(self) -> "torch.Event | None":
        """Return an event after all work queued on the device so far; the copy waits for it."""
        if self._on_host:
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def take(
        self, tensors: Sequence[torch.Tensor], after: "torch.Event | None"
    ) -> Iterator[memoryview]:
        """Copy the tensors one by one; return an iterator over their bytes, to be read later."""
        self.reserve(sum(one.nbytes for one in tensors))
        if self._on_host:
            filled = self._copy(tensors)
        else:
            # A separate stream: the copy need not wait for the forward that is queued meanwhile. The
            # same one for all saves, as each stream has its own pool of device memory.
            if self._stream is None:
                self._stream = torch.Stream(self._device)
            with self._stream:
                if after is not None:
                    self._stream.wait_event(after)
                filled = self._copy(tensors)
            self._stream.synchronize()
        return itertools.chain.from_iterable(map(byte_pieces_of, filled))

    def reserve(self, size_bytes: int) -> None:
        """Allocate ``size_bytes`` of memory; a training calls this before its first step.

        On an accelerator the memory is pinned: the device copies to it while the host does other
        work. Pinning takes about 0.3 s per GB, in which the device may have to wait.
        """
        missing = size_bytes - sum(len(block) for block in self._blocks)
        if missing > 0:
            sizes = [missing] if self._on_host else pinned_blocks(missing)
            self._blocks += [
                torch.empty(size, dtype=torch.uint8, pin_memory=not self._on_host) for size in sizes
            ]

    def release(self) -> None:
        """Release the memory."""
        self._blocks = []
        if not self._on_host and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()  # torch keeps pinned memory for later use

    def _copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the tensors to the blocks, one after the other; return what they fill."""
        filled: list[torch.Tensor] = []
        blocks, room = iter(self._blocks), torch.empty(0, dtype=torch.uint8)
        for tensor in tensors:
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            while len(source):
                if not len(room):
                    room = next(blocks)
                    filled.append(room)
                count = min(len(source), len(room))
                room[:count].copy_(source.narrow(0, 0, count), non_blocking=not self._on_host)
                source = source.narrow(0, count, len(source) - count)
                room = room[count:]
        if len(room):
            filled[-1] = filled[-1][: len(filled[-1]) - len(room)]
        return filled


class AsyncSave:
    """The state of a save, shared by the training thread and the writing thread."""

    def __init__(
        self,
        store: Store,
        world: World,
        exchange: RankExchange,
        facts: WriteFacts,
        *,
        keep: int,
        rest: Any,
        own: Any,
        tensors: dict[str, torch.Tensor],
        changing: Collection[str],
        staging: Staging | None,
        waited_s: float,
    ) -> None:
        """Copy what changes before the next update, if ``staging``; else nothing changes meanwhile.

        Values may differ between ranks, as each rank's BatchNorm has seen different samples. Rank
        0's values are saved, so only rank 0 writes these unsharded tensors.
        """
        self._store = store
        self._world = world
        self._exchange = exchange
        self._keep = keep
        self._rest = rest
        self._own = own
        self._tensors = tensors
        self._only_first = {one for one in changing if not isinstance(tensors[one], DTensor)}
        self._copies: dict[str, torch.Tensor] = {}
        if staging is not None:
            written = changing if world.is_first else set(changing) - self._only_first
            self._copies = {one: tensors[one].clone() for one in written}
        self._staging = staging
        self.pace = Pace()
        if staging is None or world.device.type != "cpu":
            self.pace.hurry()  # training waits for it, or uses another device
        self._begun = time.perf_counter()
        self._ready = staging.ready() if staging is not None else None
        self.facts = facts
        self.staged = threading.Event()  # everything that an update changes is copied
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        self.name = ""
        self.problem = ""
        self.size_bytes = 0
        self.waited_s = waited_s
        self.stall_s = 0.0
        self.took_s = 0.0

    def run(self) -> None:
        """Split the state among the ranks, copy it, write it, commit. Never raises."""
        try:
            use_device(self._world.device)  # this may be a new thread
            self._write()
        except RankFailure as error:
            self.problem = error_text(error)
            if self.name:  # if that fails too, the next successful save does it
                remove_unfinished(self._store, self.name, self._world)
        except Exception as error:
            # The others may have committed.
            self.problem = error_text(error)
        finally:
            self._tensors, self._copies = {}, {}
            self.took_s = time.perf_counter() - self._begun
            self.staged.set()
            self.done.set()

    def _write(self) -> None:
        self.name, tied, is_same = self._exchange.run(
            lambda: layout_digest(self._tensors, self._only_first), self._begin
        )
        tensors = {**self._tensors, **self._copies}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
        # The copies on the device are released once they are staged, not when the files are written.
        self._tensors, self._copies = tensors, {}
        without_values = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
        }
        only_first = self._only_first - tied.keys()
        writers = None
        if not is_same:
            left_out = () if self._world.is_first else only_first
            writers = self._exchange.run(lambda: holdings_of(tensors, left_out), assign_writers)
        plan = SavePlan(mine=frozenset(), splits={})

        def write() -> dict[str, Any]:
            nonlocal plan
            try:
                plan = self._plan(tensors, only_first, writers)
                return write_rank_files(
                    self._store,
                    self.name,
                    tensors,
                    plan,
                    rank=self._world.global_rank,
                    own=self._own,
                    take=unstaged_bytes if self._staging is None else self._take,
                    rest_after=self.pace.rest,
                )
            finally:
                self.staged.set()  # after an error, training need not wait for the other ranks

        def commit(written: list[dict[str, Any]]) -> int:
            return commit_save(
                self._store,
                self.name,
                self.facts,
                written,
                tensors=without_values,
                plan=plan,
                tied=tied,
                rest=self._rest,
            )

        self.size_bytes = self._exchange.run(write, commit)
        if self._world.is_first:
            # Deletions that fail now are retried after the next save.
            with contextlib.suppress(OSError, MusterError):
                keep_newest(self._store, self._keep, just_committed=self.name)

    def _begin(self, layouts: list[str]) -> list[Any]:
        """Return the name of the checkpoint, tied tensors, and whether all ranks plan the same."""
        return [
            new_name(self.facts.step),
            shared_tensors(self._tensors),
            len(set(layouts)) == 1,
        ]

    def _plan(
        self,
        tensors: Mapping[str, torch.Tensor],
        only_first: Collection[str],
        writers: Mapping[str, Collection[int]] | None,
    ) -> SavePlan:
        rank = self._world.global_rank
        if writers is None:
            return plan_save(
                tensors, only_first=only_first, rank=rank, world_size=self._world.world_size
            )
        mine = frozenset(name for name, ranks in writers.items() if rank in ranks)
        return SavePlan(mine=mine, splits={})

    def _take(self, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
        assert self._staging is not None
        content = self._staging.take(tensors, self._ready)
        tensors.clear()
        self._tensors.clear()
        self.staged.set()
        return content


Mode = Literal["auto", "async", "sync"]


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The result of a save. ``problem`` is the same on all ranks; "" if committed."""

    step: int
    name: str
    size_bytes: int  # of all ranks together; 0 if it failed
    stall_s: float  # how long this rank's training waited for it
    waited_s: float  # the part of it spent on the previous save
    took_s: float
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded state. ``own`` is this rank's; None if it was saved by another number of ranks."""

    step: int
    state: dict[str, Any]
    own: dict[str, Any] | None
    found: NewestCheckpoint


class Checkpointer:
    """Saves to a store and loads from it. One save runs at a time."""

    def __init__(
        self,
        store: Store,
        world: World,
        *,
        strategy: str,
        keep: int = 3,
        keep_best: bool = False,
        mode: Mode = "auto",
        global_batch_size: int | None = None,
        buffers: Collection[str] | None = None,
        on_saved: Callable[[SaveReport], None] = lambda report: None,
    ) -> None:
        """Prepare to save; nothing is written yet.

        ``buffers`` names the model's tensors that a forward changes; rank 0's values are saved.
        Default: all tensors that the optimizer does not train, including frozen weights.

        ``on_saved`` is called for every save, committed or failed, in the training thread, on the
        next call of one of these methods; ranks call it at different steps, so it must not
        communicate.
        """
        if not dist.is_initialized():
            raise Impossible(
                "a Checkpointer was created before the process group",
                fix="create the group first: with join_world() as world: …",
            )
        self.store = store
        self.mode = _begin_with(mode)
        self._asked = mode
        self._world = world
        self._strategy = strategy
        self._global_batch_size = global_batch_size
        self._keep = keep
        self._keep_best = keep_best
        self._buffers = buffers
        self._on_saved = on_saved
        self._exchange = RankExchange.of_job(world)
        self._staging = Staging(world.device)
        self._save: AsyncSave | None = None
        self._last: SaveReport | None = None

    def check_room(self, state: dict[str, Any]) -> list[Finding]:
        """Check free memory and disk space before the first step; decide how "auto" saves.

        Deletes the files of interrupted saves: only one training run saves to a location.
        """
        self.wait()
        size_bytes = disk_check.checkpoint_bytes(flatten(state)[1].values())
        memory = disk_check.fits_in_memory(size_bytes, self._world)
        lack = self._exchange.run(
            lambda: "" if memory.value else memory.reason, lambda of_ranks: max(of_ranks, key=bool)
        )
        findings = self._exchange.run(lambda: self._look_at_disk(size_bytes), first_of)
        found = [finding_of_rank(one) for one in findings]
        if not any(one.status is Status.FAILURE for one in found):
            found += disk_check.storage_findings(self.store, self._world, self._exchange)
        if self._asked == "auto":
            self.mode = (
                Decision(value="sync", reason=f"training waits for each save: {lack}")
                if lack
                else Decision(value="async", reason=f"saves run in the background: {memory.reason}")
            )
        elif lack and self._asked == "async":
            found.append(disk_check.memory_finding(lack))
        fits = not lack and not any(one.status is Status.FAILURE for one in found)
        if self.mode.value == "async" and fits and self._world.device.type != "cpu":
            with contextlib.suppress(RuntimeError):  # the first save tries again, and reports it
                self._staging.reserve(size_bytes // self._world.world_size)
        return found

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        own: dict[str, Any],
        best: Mapping[str, float] | None = None,
    ) -> None:
        """Save a state; returns when everything that changes before the next update is copied.

        Parameters and optimizer states are copied while the next forward and backward run, until
        :meth:`before_update`. ``own`` is this rank's own state, as JSON types. ``best`` marks the best
        checkpoint so far, with its metric: it is kept in addition to the newest ones.
        """
        begun = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - begun
        rest, tensors = flatten(state)
        refuse_unknown_dtype(tensors)
        beside = self.mode.value == "async"
        save = AsyncSave(
            self.store,
            self._world,
            self._exchange,
            WriteFacts(
                step=step,
                world_size=self._world.world_size,
                strategy=self._strategy,
                global_batch_size=self._global_batch_size,
                best=best,
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
            # A daemon: a failed training exits at once, even if the store still waits.
            thread = threading.Thread(target=save.run, name="muster-saving", daemon=True)
            save.thread = thread
            thread.start()
            save.stall_s += time.perf_counter() - begun
        else:
            save.run()
            save.stall_s += time.perf_counter() - begun
            self._hear()

    def before_update(self) -> None:
        """Wait until parameters and optimizer states, which an update changes, are copied."""
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
        """Wait until the last save is committed or has failed; return its report."""
        if self._save is not None:
            self._save.pace.hurry()
            self._save.done.wait()
            self._hear()
        return self._last

    def load(self, state: dict[str, Any], *, optional: Collection[str] = ()) -> Loaded | None:
        """Load the newest good checkpoint into the tensors of ``state``; None if there is none.

        The tensors keep their device and sharding, regardless of the number of ranks that wrote
        them. The returned state has these tensors, and everything else as saved. ``optional`` names
        tensors (``model.layers.0.weight``) that a checkpoint may lack if it names the base model
        that they come from; these are unchanged and not in the returned state.
        """
        self.wait()
        found = newest_valid_checkpoint(self.store, self._world, self._exchange)
        if found is None:
            return None
        read = loading.load_into(
            self.store, found, state, self._world, self._exchange, optional=optional
        )
        return Loaded(step=found.manifest.step, state=read.state, own=read.own, found=found)

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank; all ranks call this."""
        return bool(self._exchange.run(lambda: flag, any))

    def close(self) -> None:
        """Wait for the last save and release its resources."""
        self.wait()
        self._staging.release()
        self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other ranks may be gone, and a save that waits for them would never finish.
        if error is None:
            self.close()

    def _look_at_disk(self, size_bytes: int) -> list[dict[str, str]]:
        if not self._world.is_first:
            return []
        sweep_unfinished(self.store)
        return [
            one.as_json()
            for one in disk_check.disk_findings(
                size_bytes, self.store, keep=self._keep + self._keep_best
            )
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
        return Decision(value="async", reason="saves run in the background")
    return Decision(value=mode, reason=f"mode {mode}: requested")


def _changing(
    state: dict[str, Any], tensors: dict[str, torch.Tensor], buffers: Collection[str] | None
) -> list[str]:
    """Return the names of tensors that may change before the next update."""
    if buffers is None:
        groups = state.get("optimizer", {}).get("param_groups", ())
        trained = {f"model.{name}" for group in groups for name in group["params"]}
        tied = shared_tensors(tensors)
        late = {name for name in tensors if tied.get(name, name) in trained}
    else:
        early = {f"model.{name}" for name in buffers}
        late = {name for name in tensors if name.startswith("model.") and name not in early}
    return [name for name in tensors if name not in late and not name.startswith("optimizer.")]
