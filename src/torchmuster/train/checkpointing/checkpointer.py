"""``Checkpointer``: saves the training state in the background, and loads the newest good one.

::

    with Checkpointer("checkpoints") as checkpointer:
        loaded = checkpointer.load(state())
        ...
        optimizer.step()
        if step % 100 == 0:
            checkpointer.save(state(), step)

Tensors are written by torch's DCP (``torch.distributed.checkpoint``) as safetensors, by all ranks together. Everything
else is in one manifest with the hash of every file, which rank 0 writes as soon as all ranks have written. All ranks
call every method, in the same order.
"""

import contextlib
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from torchmuster.checkpoints.manifest import (
    FileRecord,
    Manifest,
    commit_checkpoint,
    new_name,
    sha256_of,
)
from torchmuster.checkpoints.store import Store, open_store
from torchmuster.checkpoints.verify import (
    NewestCheckpoint,
    inspect_checkpoint,
    keep_newest,
    newest_first,
    sweep_unfinished,
    verify_file,
)
from torchmuster.devices.readers.cpu import read_cpu
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.checkpointing.local_copy import LocalCopy
from torchmuster.train.checkpointing.matching import tensors_to_load
from torchmuster.train.checkpointing.ranks import Ranks, cause_of
from torchmuster.train.checkpointing.state_tree import flatten, tied_tensors, unflatten
from torchmuster.train.out_of_memory import local_bytes
from torchmuster.units import format_bytes

# Planning takes one message per rank; from this number on, torch reuses the plan of the last save.
CACHE_PLANS_FROM = 64
# The dtypes that safetensors and torch share.
_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64),
}
_planner_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The result of a save. ``problem`` is the same on all ranks; None if committed."""

    step: int
    name: str
    size_bytes: int  # of all ranks together; 0 if it failed
    stall_s: float  # how long this rank's training waited for it, and for the previous save
    took_s: float
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded state. ``own`` is this rank's; None if it was saved by another number of ranks."""

    step: int
    state: dict[str, Any]
    own: dict[str, Any] | None
    newest: NewestCheckpoint


class Checkpointer:
    """Saves to a folder or URL and loads from it. One save runs at a time."""

    def __init__(
        self,
        location: "Store | Path | str",
        *,
        strategy: str = "",
        keep: int = 3,
        global_batch_size: int | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
    ) -> None:
        """Prepare to save; nothing is written yet.

        ``keep`` newest checkpoints and the best one are kept. ``on_saved`` is called for every save,
        committed or failed, in the training thread, on the next call of one of these methods; ranks
        call it at different steps, so it must not communicate.
        """
        if not dist.is_initialized():
            raise Impossible(
                "a Checkpointer was created before the process group",
                fix="create the group first: with join_world() as world: …",
            )
        if keep < 1:
            raise Impossible(f"keep is {keep}, but must be at least 1: the checkpoint just saved")
        if isinstance(location, str | Path):
            location = open_store(location)
        self.store: Store = location
        self._strategy = strategy
        self._keep = keep
        self._global_batch_size = global_batch_size
        self._on_saved = on_saved
        self._ranks = Ranks()
        self._local = LocalCopy(location, self._ranks)
        self._planner = _planner_class()
        self._stager: DefaultStager | None = None
        self._thread: threading.Thread | None = None  # commits the save that is being written
        self._report: SaveReport | None = None  # of the last save
        self._began_s = 0.0
        self._is_synchronous = False  # the host has no memory for copies

    def check_room(self, state: dict[str, Any]) -> str:
        """Check before the first step that a checkpoint fits, and that all ranks see the same folder.

        Deletes the files of interrupted saves: only one training run saves to a location. If the host
        has no memory for copies of the ranks' tensors, saves will wait for the disk; return why, or "".
        """
        self.wait()
        tensors = flatten(state)[1].values()
        with self._ranks.together():
            if self._ranks.is_first:
                sweep_unfinished(self.store)
                _refuse_small_room(self.store, sum(tensor.nbytes for tensor in tensors))
        self._local.refuse_unshared()
        copied_bytes = local_bytes(tensors)
        free_bytes = read_cpu().free_bytes
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        is_small = free_bytes is not None and copied_bytes * ranks_here > free_bytes
        self._is_synchronous = any(self._ranks.from_all(is_small))
        if not self._is_synchronous:
            return ""
        return (
            f"saves stop the training until they are written: a host has no memory for copies of "
            f"{format_bytes(copied_bytes)} for each rank"
        )

    def save(
        self,
        state: dict[str, Any],
        step: int,
        *,
        own: dict[str, Any] | None = None,
        best: Mapping[str, float] | None = None,
    ) -> None:
        """Save a state; returns when its tensors are copied to host memory.

        The state is a tree of dictionaries, lists, tensors, numbers and strings. Sharded tensors stay
        sharded; of the others that the optimizer does not train, such as the statistics of BatchNorm,
        rank 0's are saved. ``own`` is this rank's own state, as JSON types. ``best`` marks the best
        checkpoint so far, with its metric.
        """
        self._began_s = time.perf_counter()
        self.wait()
        rest, tensors = flatten(state)
        _refuse_unsupported(tensors)
        tied = tied_tensors(tensors)
        name = self._ranks.from_first(new_name(step))
        future = self._write(name, self._tensors_to_write(state, tensors, tied))
        manifest = Manifest(
            name=name,
            step=step,
            world_size=self._ranks.size,
            strategy=self._strategy,
            global_batch_size=self._global_batch_size,
            made_unix_s=round(time.time(), 3),
            files={},
            best=best,
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
            tied=tied,
            state=rest,
        )
        self._report = SaveReport(
            step=step,
            name=name,
            size_bytes=0,
            stall_s=time.perf_counter() - self._began_s,
            took_s=0.0,
            problem="the process is ending",
        )
        # A daemon: a failed training exits at once, even if the storage still waits.
        self._thread = threading.Thread(
            target=self._finish, args=(future, manifest, own), name="muster-saving", daemon=True
        )
        self._thread.start()

    def poll(self) -> None:
        """Report a save that has ended meanwhile; call it every step."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> SaveReport | None:
        """Wait until the last save is committed or has failed; return its report."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            assert self._report is not None
            if self._report.problem is not None:
                self._planner = _planner_class()  # forget plans that were made but not used
            if self._on_saved is not None:
                self._on_saved(self._report)
        return self._report

    def load(self, state: dict[str, Any], *, optional: Collection[str] = ()) -> Loaded | None:
        """Load the newest good checkpoint into the tensors of ``state``; None if there is none.

        The tensors keep their device and sharding, regardless of the number of ranks that wrote
        them. The returned state has these tensors, and everything else as saved. ``optional`` names
        tensors (``model.layers.0.weight``) that a checkpoint may lack if it names the base model
        that they come from; these are unchanged and not in the returned state. A checkpoint that
        does not match is rejected before anything is changed.
        """
        self.wait()
        newest = self._newest_good()
        if newest is None:
            return None
        manifest, folder = newest.manifest, str(self._local.folder(newest.name))
        with self._ranks.together():
            stored = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
            tensors = tensors_to_load(manifest, stored, state, optional)
        twice = manifest.tied.keys() | tied_tensors(tensors).keys()
        with self._ranks.together():
            load(
                {name: tensor for name, tensor in tensors.items() if name not in twice},
                storage_reader=HuggingFaceStorageReader(folder),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._ranks.group,
            )
        for name, first in manifest.tied.items():
            if name in tensors:
                tensors[name].copy_(tensors[first])
        self._local.clear(newest.name)
        own = manifest.own[self._ranks.rank] if len(manifest.own) == self._ranks.size else None
        return Loaded(
            step=manifest.step, state=unflatten(manifest.state, tensors), own=own, newest=newest
        )

    def close(self) -> None:
        """Wait for the last save and release its memory."""
        self.wait()
        if self._stager is not None:
            self._stager.close()
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error other ranks may be gone, and a save that waits for them would never finish.
        if error is None:
            self.close()

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> "Future[Any]":
        """Begin to write tensors; they are copied when this returns."""
        options: dict[str, Any] = {
            "storage_writer": HuggingFaceStorageWriter(
                str(self._local.folder(name)), save_distributed=True
            ),
            "planner": self._planner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                enable_plan_caching=self._ranks.size >= CACHE_PLANS_FROM,
            ),
            "process_group": self._ranks.group,
        }
        if self._is_synchronous:
            written: Future[Any] = Future()
            try:
                written.set_result(save(tensors, **options))
            except (Exception, CheckpointException) as error:
                written.set_exception(error)
            return written
        if self._stager is None:
            self._stager = _stager()
        future = async_save(tensors, async_stager=self._stager, **options)
        assert isinstance(future, Future), "the stager copies before it returns"
        return future

    def _tensors_to_write(
        self, state: dict[str, Any], tensors: dict[str, torch.Tensor], tied: Mapping[str, str]
    ) -> dict[str, torch.Tensor]:
        """Return what this rank offers to DCP, which divides equal tensors among the ranks."""
        groups = state.get("optimizer", {}).get("param_groups", ())
        trained = {f"model.{name}" for group in groups for name in group["params"]}
        trained |= {tied[name] for name in trained & tied.keys()}
        mine = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            is_empty_shard = isinstance(tensor, DTensor) and not local.numel()
            is_of_first = (
                not isinstance(tensor, DTensor)
                and name not in trained
                and not name.startswith("optimizer.")
            )
            if name in tied or is_empty_shard or (is_of_first and not self._ranks.is_first):
                continue
            mine[name] = tensor if local.is_contiguous() else tensor.contiguous()
        return mine

    def _finish(self, future: "Future[Any]", manifest: Manifest, own: Any) -> None:
        """Commit a save and complete its report; runs in a thread of its own, on all ranks."""
        assert self._report is not None
        size_bytes = 0
        try:
            problem, size_bytes = self._commit(future, manifest, own)
        except Exception as error:  # another rank is gone
            problem = f"{type(error).__name__}: {error}"
        self._report = replace(
            self._report,
            size_bytes=size_bytes,
            took_s=time.perf_counter() - self._began_s,
            problem=problem,
        )

    def _commit(
        self, future: "Future[Any]", manifest: Manifest, own: Any
    ) -> tuple[str | None, int]:
        """Wait until all ranks have written, and write the manifest; return the problem and the size."""
        name, ranks = manifest.name, self._ranks
        files, problem = {}, None
        try:
            future.result()
            files = self._own_files(name)
        except (Exception, CheckpointException) as error:
            problem = cause_of(error, ranks.rank)
        gathered = ranks.from_all((problem, files, own))
        size_bytes = 0
        if ranks.is_first:
            problem = next((text for text, _, _ in gathered if text is not None), None)
            files = {}
            for _, files_of_rank, _ in gathered:
                files |= files_of_rank
            manifest = msgspec.structs.replace(
                manifest, files=files, own=tuple(own_of_rank for _, _, own_of_rank in gathered)
            )
            try:
                if problem is None:
                    size_bytes = commit_checkpoint(self.store, manifest).size_bytes
            except (OSError, MusterError, ValueError) as error:
                problem = cause_of(error, 0)
            with contextlib.suppress(OSError, MusterError):  # the next save tries it again
                if problem is None:
                    keep_newest(self.store, self._keep)
                else:
                    self.store.delete(name)
        self._local.clear(name)
        result: tuple[str | None, int] = ranks.from_first((problem, size_bytes))
        return result

    def _own_files(self, name: str) -> dict[str, FileRecord]:
        """Read back and hash what this rank has written, and upload it to object storage."""
        folder = self._local.folder(name)
        paths = sorted(folder.glob(f"shard-{self._ranks.rank + 1:05d}-*"))
        records = {}
        for path in paths:
            size_bytes = path.stat().st_size
            sha256 = sha256_of(self._local.store, name, path.name, size_bytes)
            records[path.name] = FileRecord(size_bytes=size_bytes, sha256=sha256)
        self._local.upload(name, paths)
        return records

    def _newest_good(self) -> NewestCheckpoint | None:
        """Return the newest checkpoint whose files are all intact; None if there is no checkpoint.

        Rank 0 lists them, as listings of shared disks may differ. If none of them is good, it raises
        an error: starting from scratch would silently discard all of them.
        """
        names: list[str] = []
        with self._ranks.together():
            if self._ranks.is_first:
                names = newest_first(self.store)
        rejected: list[Finding] = []
        for name in self._ranks.from_first(names):
            manifest, findings = self._verified_by_all(name)
            if manifest is not None and not findings:
                return NewestCheckpoint(name=name, manifest=manifest, rejected=tuple(rejected))
            rejected += findings
            self._local.clear(name)
        if any(finding.status is Status.FAILURE for finding in rejected):
            raise MusterError(
                f"all checkpoints in {self.store.where} are unusable",
                why="\n".join(finding.what for finding in rejected),
                fix="to see the errors: muster checkpoint verify; to start from scratch, move the "
                "checkpoints away",
            )
        return None

    def _verified_by_all(self, name: str) -> tuple[Manifest | None, list[Finding]]:
        """Return rank 0's manifest, and the findings of all ranks, each of which reads a part of the files."""
        first: tuple[Manifest | None, list[Finding]] = None, []
        with self._ranks.together():
            if self._ranks.is_first:
                first = inspect_checkpoint(self.store, name)
        manifest, findings = self._ranks.from_first(first)
        if manifest is None or findings:
            return None, findings
        with self._ranks.together():
            for file in self._local.share(sorted(manifest.files)):
                self._local.download(name, file)
                findings += verify_file(self._local.store, name, file, manifest.files[file])
        by_text = {}
        for findings_of_rank in self._ranks.from_all(findings):
            by_text.update({finding.what: finding for finding in findings_of_rank})
        return manifest, list(by_text.values())


def _planner_class() -> type[DefaultSavePlanner]:
    """Return a subclass of its own: torch caches plans per class name, for all of a process's saves.

    Two checkpointers of one class would get each other's plans (NVIDIA-NeMo/Automodel#3369).
    """
    return type(f"SavePlanner{next(_planner_numbers)}", (DefaultSavePlanner,), {})


def _stager() -> DefaultStager:
    """Return a stager that copies to host memory, reused by all saves, before it returns."""
    is_on_device = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_on_device,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_on_device,
        )
    )


def _refuse_unsupported(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for a tensor that safetensors cannot hold; torch would write a file that nobody can read."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise Impossible(
                f"{name} cannot be saved in a checkpoint: it is {tensor.dtype}, {tensor.layout}",
                why="safetensors does not support this dtype or layout",
                fix=f"convert it to {', '.join(sorted(map(str, _DTYPES)))}",
            )


def _refuse_small_room(store: Store, size_bytes: int) -> None:
    """Raise if a checkpoint of this size does not fit in the store."""
    free = store.free_bytes()
    if free is not None and free < size_bytes:
        raise Impossible(
            f"no space for a checkpoint in {store.where}",
            why=f"a checkpoint takes {format_bytes(size_bytes)}; free: {format_bytes(free)}",
            fix="free disk space there, or save to another location (checkpoint.folder)",
        )
