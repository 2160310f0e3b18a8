"""Read torch's flight recorders inside a rank: which collectives it has begun, and which it waits in.

Runs inside the ranks, whatever is installed there: standard library only. Torch is used only once the script has
created a process group, and never imported here.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchmuster.launch.torch_private import flight_recorders, group_names

_ENTRIES_KEPT = 400
_SAVES = "muster-saving"  # the thread that saves checkpoints (train/checkpointing/checkpointer.py)

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CollectiveProgress:
    """What the recorders show: ``begun`` is the number of the last collective of each group, ``waits`` the oldest
    unfinished one of each group, and ``worker`` the thread that the main thread waits for, if any.
    """

    begun: dict[str, int]
    waits: list[dict[str, Any]]
    worker: int | None


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """What the recorders count: ``count`` is the number of collectives of all groups, None if no recorder is on.

    ``text`` changes whenever a collective starts or finishes; ``has_unfinished`` says that one has not finished.
    """

    text: bytes = b""
    count: int | None = None
    has_unfinished: bool = False


def read_status() -> CollectiveStatus:
    """Count the collectives of this rank."""
    texts = [dump(includeCollectives=False) for dump in _recorders().values()]
    count, is_visible, has_unfinished = 0, False, False
    for text in filter(None, texts):
        content = json.loads(text)
        is_visible = is_visible or bool(content.get("pg_config"))
        for group in content.get("pg_status", {}).values():
            begun = group.get("last_enqueued_collective")
            count += max(0, int(begun or 0))
            has_unfinished |= begun != group.get("last_completed_collective")
    return CollectiveStatus(
        text=b"\n".join(texts),
        count=count if is_visible or count else None,
        has_unfinished=has_unfinished,
    )


def read_progress(*, main_waits_for_thread: bool) -> CollectiveProgress:
    """Return this rank's progress in its groups.

    Collectives of background threads do not count, because checkpoints are saved in one. But if the main
    thread only waits for another thread, that thread's collectives count.
    """
    groups = _entries_by_group()
    background = _background_threads()
    worker = None
    if main_waits_for_thread:
        worker = _last_thread_in_a_collective(background, groups.values())
    begun = dict.fromkeys(joined_groups(), 0)
    waits = []
    for group, entries in groups.items():
        begun[group] = max(entry["collective_seq_id"] for entry in entries)
        unfinished = []
        for entry in entries:
            thread = _thread_of(entry)
            if not _is_done(entry) and (thread == worker or thread not in background):
                unfinished.append(entry)
        if unfinished:
            oldest = min(unfinished, key=lambda entry: entry["collective_seq_id"])
            waits.append(pending_collective(group, oldest))
    return CollectiveProgress(begun=begun, waits=waits, worker=worker)


def joined_groups() -> list[str]:
    """Return the names of this rank's process groups, which are the same on all ranks; [] if unknown."""
    return group_names() if _recorders() else []


def dump_entries() -> str:
    """Return the last entries of the first recorder that has any, as its own JSON.

    Without any entry the dump is an empty one: the collectives are not visible. "" means that torch has no recorder.
    """
    content: dict[str, Any] = {}
    for dump in _recorders().values():
        content = json.loads(dump())
        if content.get("entries"):
            break
    if not content:
        return ""
    return json.dumps(content | {"entries": content.get("entries", [])[-_ENTRIES_KEPT:]})


def use_rank_device(recorded_device: Any = None) -> None:
    """Make this rank's GPU the current device of this thread, before the collectives are read.

    Reading them queries events of the GPU. A new thread starts with GPU 0, where a query opens a context of about
    0.5 GB. If neither the group nor ``recorded_device`` names the GPU, it is that of the local rank, as in nearly all
    scripts.
    """
    torch, distributed = sys.modules.get("torch"), _initialized_distributed()
    if torch is None or distributed is None:
        return
    if not torch.cuda.is_initialized() and not torch.xpu.is_initialized():
        return
    device = distributed.group.WORLD.bound_device_id or recorded_device
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)
    elif distributed.get_backend() != "gloo":
        local_rank = os.environ.get("LOCAL_RANK", "")
        index = int(local_rank) if local_rank.isdecimal() else 0
        torch.accelerator.set_device_index(min(index, torch.accelerator.device_count() - 1))


def _initialized_distributed() -> Any:
    """Return ``torch.distributed`` once the script has a process group; it may be half imported before."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return distributed


def _recorders() -> Mapping[str, Callable[..., bytes]]:
    if _initialized_distributed() is None:
        return {}
    return flight_recorders()


def _entries_by_group() -> dict[str, list[Entry]]:
    """Return the collectives of each group, oldest first.

    A group of two backends (``cpu:gloo,cuda:nccl``) numbers the collectives of each separately, so its second
    backend counts as a group of its own.
    """
    groups: dict[str, list[Entry]] = {}
    for backend, dump in _recorders().items():
        recorded: dict[str, list[Entry]] = {}
        for entry in json.loads(dump()).get("entries", ()):
            if not entry.get("is_p2p"):
                recorded.setdefault(str(entry["process_group"][0]), []).append(entry)
        for name, entries in recorded.items():
            label = f"{name} ({backend})" if name in groups else name
            groups[label] = entries
    return groups


def _is_done(entry: Entry) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def pending_collective(group: str, entry: Entry) -> dict[str, Any]:
    """Return an entry of a recorder as a ``PendingCollective``."""
    return {
        "group": group,
        "number": entry["collective_seq_id"],
        "operation": str(entry.get("profiling_name", "")).rpartition(":")[2],
        "shapes": " ".join(map(str, entry.get("input_sizes", ())))[:200],
        "dtype": " ".join(dict.fromkeys(map(str, entry.get("input_dtypes", ()))))[:60],
    }


def _background_threads() -> dict[int, str]:
    """Return the names of Python's threads except the main one."""
    main = threading.main_thread().ident
    background = {}
    for thread in threading.enumerate():
        # Autograd's threads, which reduce gradients, are not Python threads.
        is_foreign = isinstance(thread, threading._DummyThread)
        if thread.ident not in (main, None) and not is_foreign:
            background[thread.ident] = thread.name
    return background


def _last_thread_in_a_collective(
    background: Mapping[int, str], groups: Iterable[list[Entry]]
) -> int | None:
    """Return which background thread started a collective last, without the one that saves checkpoints."""
    last_ns, last_thread = -1, None
    for entries in groups:
        for entry in entries:
            thread, created_ns = _thread_of(entry), entry.get("time_created_ns", 0)
            if background.get(thread, _SAVES) != _SAVES and created_ns > last_ns:
                last_ns, last_thread = created_ns, thread
    return last_thread


def _thread_of(entry: Entry) -> int:
    number = str(entry.get("thread_id"))
    return int(number) if number.isdecimal() else 0
