"""Which checkpoints are kept. The newest good one always is."""

import contextlib

from torchmuster.checkpoints.manifest import Manifest, committed
from torchmuster.checkpoints.store import Store, step_of
from torchmuster.checkpoints.verify import look, verify
from torchmuster.errors import MusterError


def keep_newest(store: Store, keep: int, *, just_committed: str = "") -> list[str]:
    """Delete all but the newest ``keep`` checkpoints, and what older saves left unfinished.

    Nothing is deleted before a good one is found, from the newest on; what is newer than that is left for people
    to look at. A good one is one whose files were all read; of ``just_committed``, whose files this process
    read back as it wrote them, only the sizes are compared again. Returns what was deleted; what cannot be
    deleted stays, and the next time it is tried again.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint is kept")
    manifests = committed(store)
    good = next((one for one in manifests if _is_good(store, one, just_committed)), None)
    if good is None:
        return []
    older = manifests[manifests.index(good) + 1 :]
    doomed = [one.name for one in older[keep - 1 :]] + _unfinished(store, good)
    return [name for name in doomed if _deleted(store, name)]


def sweep_unfinished(store: Store) -> list[str]:
    """Delete all that has no marker: only for who alone saves there, and does not save now."""
    return [name for name in _without_marker(store) if _deleted(store, name)]


def _is_good(store: Store, manifest: Manifest, just_committed: str) -> bool:
    if manifest.name == just_committed:
        return not look(store, manifest.name)[1]
    return not verify(store, manifest.name)


def _unfinished(store: Store, good: Manifest) -> list[str]:
    """Return those without a marker that a later save has made useless."""
    return [name for name in _without_marker(store) if (step_of(name) or 0) <= good.step]


def _without_marker(store: Store) -> list[str]:
    return [
        name
        for name in store.names()
        if any(one.name == "checkpoint-unfinished" for one in look(store, name)[1])
    ]


def _deleted(store: Store, name: str) -> bool:
    with contextlib.suppress(OSError, MusterError):
        store.delete(name)
        return True
    return False
