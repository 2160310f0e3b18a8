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

UNFINISHED = "checkpoint-unfinished"  # the name of a finding
_TENSORS = ".safetensors"
_FIX = (
    "delete it and use an older checkpoint (a resumed run uses one automatically); if no program "
    "changed the file, check the disk"
)
_DAMAGES = {
    "missing": ("checkpoint-file-missing", "is missing"),
    "truncated": ("checkpoint-file-truncated", "is truncated"),
    "changed": ("checkpoint-file-changed", "differs from what was written"),
    "extra": ("checkpoint-file-extra", "does not belong to it"),
    "unreadable": ("checkpoint-unreadable", "cannot be read"),
}


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest good checkpoint, and the findings about newer ones that were skipped."""

    name: str
    manifest: Manifest
    rejected: tuple[Finding, ...] = ()


def inspect_checkpoint(store: Store, name: str) -> tuple[Manifest | None, list[Finding]]:
    """Read the manifest and compare the set of files and their sizes, which is fast; [] if all match.

    The manifest is None if none can be read. Another file of tensors is damage too: torch reads every
    ``*.safetensors`` in the folder.
    """
    try:
        manifest = read_manifest(store, name)
    except ForeignVersion as error:
        finding = Finding(
            name="checkpoint-foreign-version",
            status=Status.FAILURE,
            what=f"{name} was written by another version of torchmuster",
            why=str(error),
            fix="install the version that wrote it, or use an older checkpoint",
            evidence=f"{store.where}/{name}/{MARKER}",
        )
        return None, [finding]
    except (UnreadableManifest, OSError) as error:
        return None, [damage(store, name, MARKER, "unreadable", str(error))]
    if manifest is None:
        finding = Finding(
            name=UNFINISHED,
            status=Status.NOTE,
            what=f"{name} was not finished",
            why=f"it has no {MARKER}, which is written last: the save was interrupted, or is still running",
            fix="no action needed: it is never loaded, and is deleted when the run resumes",
            evidence=f"{store.where}/{name}",
        )
        return None, [finding]
    findings = []
    sizes = store.sizes(name)
    for file, record in manifest.files.items():
        findings += _compare_size(store, name, file, sizes.get(file), record)
    for file in sizes.keys() - manifest.files.keys():
        if file.endswith(_TENSORS):
            why = "no rank wrote it when the checkpoint was saved"
            findings.append(damage(store, name, file, "extra", why))
    return manifest, findings


def verify_file(store: Store, name: str, file: str, record: FileRecord) -> list[Finding]:
    """Read a file and compare its hash; [] if it is intact."""
    try:
        sha256 = sha256_of(store, name, file, record.size_bytes)
    except OSError as error:
        return [damage(store, name, file, "unreadable", error.strerror or str(error))]
    if sha256 == record.sha256:
        return []
    why = f"its SHA-256 is {sha256[:16]}…, but {record.sha256[:16]}… was expected"
    return [damage(store, name, file, "changed", why)]


def verify_checkpoint(
    store: Store, name: str, *, on_bytes: Callable[[int], None] = lambda count: None
) -> list[Finding]:
    """Read every file of a checkpoint; [] if all are intact. Call ``on_bytes`` for each file."""
    manifest, findings = inspect_checkpoint(store, name)
    if manifest is not None and not findings:
        for file, record in manifest.files.items():
            findings += verify_file(store, name, file, record)
            on_bytes(record.size_bytes)
    return findings


def newest_good(store: Store) -> NewestCheckpoint | None:
    """Return the newest checkpoint whose files are all intact; None if there is none.

    It comes with findings about newer ones that are not good; none is skipped silently.
    """
    rejected: list[Finding] = []
    for name in newest_first(store):
        findings = verify_checkpoint(store, name)
        manifest = read_manifest(store, name) if not findings else None
        if manifest is not None:
            return NewestCheckpoint(name=name, manifest=manifest, rejected=tuple(rejected))
        rejected += findings
    return None


def newest_first(store: Store) -> list[str]:
    """Return all names, newest first; those without a readable manifest are sorted by step."""
    serials = {manifest.name: manifest.serial for manifest in committed_manifests(store)}
    order, latest = [], 0
    for name in store.names():
        latest = max(latest, serials.get(name, 0))
        order.append((serials.get(name, latest), name not in serials, step_of(name) or 0, name))
    return [name for *_, name in sorted(order, reverse=True)]


def keep_newest(store: Store, keep: int) -> list[str]:
    """Delete all but the best and the newest ``keep`` checkpoints, and unfinished saves before them.

    Call it after a commit: the newest checkpoint is good, because its files were just read back.
    Returns the deleted names; failed deletions are retried the next time.
    """
    manifests = committed_manifests(store)
    if not manifests:
        return []
    newest, best = manifests[0], best_manifest(manifests)
    doomed = [manifest.name for manifest in manifests[keep:] if manifest is not best]
    doomed += [name for name in _unfinished(store) if (step_of(name) or 0) <= newest.step]
    return [name for name in doomed if _deleted(store, name)]


def sweep_unfinished(store: Store) -> list[str]:
    """Delete everything without a marker. Call it only while nothing else saves to the store."""
    return [name for name in _unfinished(store) if _deleted(store, name)]


def damage(store: Store, name: str, file: str, kind: str, why: str) -> Finding:
    """Return a finding of one kind of damage."""
    finding, problem = _DAMAGES[kind]
    return Finding(
        name=finding,
        status=Status.FAILURE,
        what=f"{name} is damaged: {file} {problem}",
        why=why,
        fix=_FIX,
        evidence=f"{store.where}/{name}/{file}",
    )


def _compare_size(
    store: Store, name: str, file: str, size_bytes: int | None, record: FileRecord
) -> list[Finding]:
    if size_bytes == record.size_bytes:
        return []
    if size_bytes is None:
        why = "it existed when the checkpoint was committed"
        return [damage(store, name, file, "missing", why)]
    kind = "truncated" if size_bytes < record.size_bytes else "changed"
    why = f"it has {size_bytes} bytes, but {record.size_bytes} were written"
    return [damage(store, name, file, kind, why)]


def _unfinished(store: Store) -> list[str]:
    return [name for name in store.names() if MARKER not in store.sizes(name)]


def _deleted(store: Store, name: str) -> bool:
    with contextlib.suppress(OSError, MusterError):
        store.delete(name)
        return True
    return False
