"""What torch's flight recorder in this process says of collectives: cheaply whether anything moves, and which.

Runs inside the ranks: standard library only. Torch is never imported here; it is asked if the script has
imported it. The recorder has no public face in Python, so its private one is used; where that is missing
or has changed, nothing is known of collectives.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchmuster.launch.torch_private import flight_recorders, group_names

_ENTRIES_KEPT = 400
_SAVES = "muster-saving"  # the thread that saves checkpoints (train/saving/checkpointer.py)


def status() -> bytes:
    """Return something that changes whenever a collective is begun or done; b"" if nothing is known."""
    return b"".join(dump(includeCollectives=False) for dump in _dumps())


def some_not_done(status_before: bytes) -> bool:
    """Say whether a status tells of a collective that was begun and is not done."""
    decoder, text, place = json.JSONDecoder(), status_before.decode(), 0
    while place < len(text):
        content, place = decoder.raw_decode(text, place)
        for one in content.get("pg_status", {}).values():
            if one.get("last_enqueued_collective") != one.get("last_completed_collective"):
                return True
    return False


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The last collective of each group by its number, and of each group the oldest that is not done."""

    begun: dict[str, int]
    waits: list[dict[str, Any]]
    worker: int | None  # the thread that works while the main one waits for it, if there is one


def standing(*, main_waits_for_thread: bool) -> Standing:
    """Return where this rank stands in its groups.

    What a thread beside the main one began does not count: that is how checkpoints are saved meanwhile.
    But if the main thread only waits for another one, that one's count.
    """
    groups = _groups()
    beside = _threads_beside()
    worker = _last_of(beside, groups.values()) if main_waits_for_thread else None
    begun = dict.fromkeys(groups_joined(), 0)
    waits = []
    for group, entries in groups.items():
        begun[group] = max(entry["collective_seq_id"] for entry in entries)
        not_done = [one for one in entries if not _is_done(one)]
        mine = [one for one in not_done if _thread(one) == worker or _thread(one) not in beside]
        if mine:
            waits.append(_told(group, min(mine, key=lambda one: one["collective_seq_id"])))
    return Standing(begun=begun, waits=waits, worker=worker)


def groups_joined() -> list[str]:
    """Return the names of the groups of ranks in which this one is; [] if that is not known.

    Torch tells them only to itself, under names that are the same on all ranks.
    """
    if not _dumps():
        return []
    return group_names()


def _told(group: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "group": group,
        "number": entry["collective_seq_id"],
        "operation": str(entry.get("profiling_name", "")).rpartition(":")[2],
        "shapes": " ".join(map(str, entry.get("input_sizes", ())))[:200],
        "dtype": " ".join(dict.fromkeys(map(str, entry.get("input_dtypes", ()))))[:60],
    }


def dump() -> str:
    """Return the recorder's last entries as its own JSON; "" if there are none."""
    for one in _dumps():
        content = json.loads(one())
        if entries := content.get("entries"):
            content["entries"] = entries[-_ENTRIES_KEPT:]
            return json.dumps(content)
    return ""


def _dumps() -> Iterable[Callable[..., bytes]]:
    # Not before the script has a group: while torch is being imported, nothing of it may be touched.
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return []
    return flight_recorders()


def _groups() -> dict[str, list[dict[str, Any]]]:
    """Return the collectives of each group, the oldest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, one in enumerate(_dumps()):
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in json.loads(one()).get("entries", ()):
            if not entry.get("is_p2p"):
                found.setdefault(str(entry["process_group"][0]), []).append(entry)
        for name, entries in found.items():
            groups[f"{name} (gloo)" if number and name in groups else name] = entries
    return groups


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _threads_beside() -> dict[int, str]:
    """Return the names of Python's threads beside the main one."""
    main = threading.main_thread().ident
    return {
        one.ident: one.name
        for one in threading.enumerate()
        # Autograd's own threads, which reduce gradients, are strangers to Python.
        if one.ident not in (main, None) and not isinstance(one, threading._DummyThread)
    }


def _last_of(threads: dict[int, str], groups: Iterable[list[dict[str, Any]]]) -> int | None:
    """Return which of some threads began a collective last; the one that saves is none of them."""
    began = [
        (entry.get("time_created_ns", 0), thread)
        for entries in groups
        for entry in entries
        if threads.get(thread := _thread(entry), _SAVES) != _SAVES
    ]
    return max(began)[1] if began else None


def _thread(entry: dict[str, Any]) -> int:
    number = str(entry.get("thread_id"))
    return int(number) if number.isdecimal() else 0
