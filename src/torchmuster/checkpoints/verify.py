"""Verify checkpoints, find the newest good one, and delete old ones."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.checkpoints.manifest import (
    FileRecord,
    ForeignVersion,
    Manifest,
    UnreadableManifest,
    best_manifest,
    committed_manifests,
    read_manifest,
    sha256_of,
)
from torchmuster.checkpoints.store import MARKER, Store, step_of
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status

_FIX = (
    "delete it and use an older checkpoint (a resumed run uses one automatically); if no program "
    "changed the file, check the disk"
)


def _not_said(count: int) -> None:
    """Ignore the progress of reading."""


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest good checkpoint, and the findings about newer ones that were skipped."""

    name: str
    manifest: Manifest
    rejected: tuple[Finding, ...] = ()


def verify_checkpoint(
    store: Store, name: str, *, on_bytes: Callable[[int], None] = _not_said
) -> list[Finding]:
    """Read every file of a checkpoint; [] if all are intact. Call ``on_bytes`` for each piece."""
    return _verified(store, name, on_bytes)[1]


def _verified(
    store: Store, name: str, on_bytes: Callable[[int], None]
) -> tuple[Manifest | None, list[Finding]]:
    manifest, findings = look_at_checkpoint(store, name)
    if manifest is not None and not findings:
        for file, record in manifest.files.items():
            findings += verify_file(store, name, file, record, on_bytes=on_bytes)
    return manifest, findings


def look_at_checkpoint(store: Store, name: str) -> tuple[Manifest | None, list[Finding]]:
    """Read the manifest and compare the file sizes, which is fast; [] if all match."""
    manifest, findings = look_at_manifest(store, name)
    if manifest is None:
        return None, findings
    sizes = store.sizes(name)
    for file, record in manifest.files.items():
        if file not in sizes:
            findings.append(_missing(store, name, file))
        elif sizes[file] != record.size_bytes:
            findings.append(_wrong_size(store, name, file, sizes[file], record))
    return manifest, findings


def look_at_manifest(store: Store, name: str) -> tuple[Manifest | None, list[Finding]]:
    """Read the manifest only; None and a finding if there is none that can be read."""
    try:
        manifest = read_manifest(store, name)
    except ForeignVersion as error:
        return None, [_foreign(store, name, str(error))]
    except (UnreadableManifest, OSError) as error:
        return None, [_unreadable(store, name, MARKER, str(error))]
    return manifest, [] if manifest is not None else [_unfinished(store, name)]


def verify_file(
    store: Store,
    name: str,
    file: str,
    record: FileRecord,
    *,
    on_bytes: Callable[[int], None] = _not_said,
) -> list[Finding]:
    """Read one file and compare its size and hash; [] if it is intact."""
    size_bytes = 0

    def count(piece_bytes: int) -> None:
        nonlocal size_bytes
        size_bytes += piece_bytes
        on_bytes(piece_bytes)

    try:
        sha256 = sha256_of(store, name, file, on_bytes=count)
    except FileNotFoundError:
        return [_missing(store, name, file)]
    except OSError as error:
        return [_unreadable(store, name, file, error.strerror or str(error))]
    if size_bytes != record.size_bytes:
        return [_wrong_size(store, name, file, size_bytes, record)]
    if sha256 != record.sha256:
        why = f"its SHA-256 is {sha256[:16]}…, but {record.sha256[:16]}… was expected"
        return [_changed(store, name, file, why)]
    return []


def newest_good(store: Store, *, at_most_step: int | None = None) -> NewestCheckpoint | None:
    """Return the newest checkpoint whose files are all intact; None if there is none.

    It comes with findings about newer ones that are not good; none is skipped silently.
    """
    rejected: list[Finding] = []
    for name in newest_first(store, at_most_step=at_most_step):
        manifest, findings = _verified(store, name, _not_said)
        if manifest is not None and not findings:
            return NewestCheckpoint(name=name, manifest=manifest, rejected=tuple(rejected))
        rejected += findings
    return None


def newest_first(store: Store, *, at_most_step: int | None = None) -> list[str]:
    """Return all names, newest first; those without a readable manifest are sorted by step."""
    serials = {one.name: one.serial for one in committed_manifests(store)}
    order, latest = [], 0
    for name in store.names():
        step = step_of(name) or 0
        if at_most_step is not None and step > at_most_step:
            continue
        latest = max(latest, serials.get(name, 0))
        order.append((serials.get(name, latest), name not in serials, step, name))
    return [name for *_, name in sorted(order, reverse=True)]


def committed_steps(store: Store) -> list[int]:
    """Return the steps of all committed checkpoints, ascending; their files are not read."""
    return sorted(one.step for one in committed_manifests(store))


def _unfinished(store: Store, name: str) -> Finding:
    return Finding(
        name="checkpoint-unfinished",
        status=Status.NOTE,
        what=f"{name} was not finished",
        why=f"it has no {MARKER}, which is written last: the save was interrupted, or is still "
        "running",
        fix="no action needed: it is never loaded, and is deleted when the run resumes",
        evidence=f"{store.where}/{name}",
    )


def _missing(store: Store, name: str, file: str) -> Finding:
    return Finding(
        name="checkpoint-file-missing",
        status=Status.FAILURE,
        what=f"{name} is damaged: {file} is missing",
        why="it existed when the checkpoint was committed",
        fix=_FIX,
        evidence=f"{store.where}/{name}/{file}",
    )


def _wrong_size(store: Store, name: str, file: str, size_bytes: int, record: FileRecord) -> Finding:
    why = f"it has {size_bytes} bytes, but {record.size_bytes} were written"
    if size_bytes > record.size_bytes:
        return _changed(store, name, file, why)
    return Finding(
        name="checkpoint-file-truncated",
        status=Status.FAILURE,
        what=f"{name} is damaged: {file} is truncated",
        why=why,
        fix=_FIX,
        evidence=f"{store.where}/{name}/{file}",
    )


def _changed(store: Store, name: str, file: str, why: str) -> Finding:
    return Finding(
        name="checkpoint-file-changed",
        status=Status.FAILURE,
        what=f"{name} is damaged: {file} differs from what was written",
        why=why,
        fix=_FIX,
        evidence=f"{store.where}/{name}/{file}",
    )


def _unreadable(store: Store, name: str, file: str, why: str) -> Finding:
    return Finding(
        name="checkpoint-unreadable",
        status=Status.FAILURE,
        what=f"{name} is damaged: {file} cannot be read",
        why=why,
        fix=_FIX,
        evidence=f"{store.where}/{name}/{file}",
    )


def _foreign(store: Store, name: str, why: str) -> Finding:
    return Finding(
        name="checkpoint-foreign-version",
        status=Status.FAILURE,
        what=f"{name} was written by another version of torchmuster",
        why=why,
        fix="install the version that wrote it, or use an older checkpoint",
        evidence=f"{store.where}/{name}/{MARKER}",
    )


def keep_newest(store: Store, keep: int, *, just_committed: str = "") -> list[str]:
    """Delete all but the best and the newest ``keep`` checkpoints, and unfinished older saves.

    Nothing is deleted before a good checkpoint is found, newest first; damaged newer ones are kept
    for inspection. A checkpoint is good if all its files were read and match. For
    ``just_committed``, whose files this process has already read back, only the sizes are compared.
    Returns the deleted names; failed deletions are retried the next time.
    """
    if keep < 1:
        raise ValueError("keep must be at least 1")
    manifests = committed_manifests(store)
    good = next((one for one in manifests if _is_good(store, one, just_committed)), None)
    if good is None:
        return []
    older = manifests[manifests.index(good) + 1 :]
    best = best_manifest(manifests)
    doomed = [one.name for one in older[keep - 1 :] if one is not best]
    doomed += _unfinished_names(store, good)
    return [name for name in doomed if _deleted(store, name)]


def sweep_unfinished(store: Store) -> list[str]:
    """Delete everything without a marker. Call it only while nothing else saves to the store."""
    return [name for name in _without_marker(store) if _deleted(store, name)]


def _is_good(store: Store, manifest: Manifest, just_committed: str) -> bool:
    if manifest.name == just_committed:
        return not look_at_checkpoint(store, manifest.name)[1]
    return not verify_checkpoint(store, manifest.name)


def _unfinished_names(store: Store, good: Manifest) -> list[str]:
    """Return the unfinished checkpoints that are older than a committed one."""
    return [name for name in _without_marker(store) if (step_of(name) or 0) <= good.step]


def _without_marker(store: Store) -> list[str]:
    return [
        name
        for name in store.names()
        if any(one.name == "checkpoint-unfinished" for one in look_at_manifest(store, name)[1])
    ]


def _deleted(store: Store, name: str) -> bool:
    with contextlib.suppress(OSError, MusterError):
        store.delete(name)
        return True
    return False
