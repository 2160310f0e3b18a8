"""The manifest: the files of a checkpoint with size and hash; written last, as commit marker.

A folder without a manifest is not a checkpoint. A manifest contains its own hash and has one
canonical form, so that a single changed bit is detected here too.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchmuster.checkpoints.store import MARKER as MARKER  # re-exported for readers of manifests
from torchmuster.checkpoints.store import (
    Store,
    decode_strictly,
    is_file_name,
    read_small,
    refuse_too_large,
    step_of,
)
from torchmuster.checkpoints.tensor_file import MOST_RANKS
from torchmuster.errors import MusterError
from torchmuster.redaction import harmless

FORMAT = 1
# Two files for each of 100,000 ranks are 32 MB.
_MOST_BYTES = 64 * 2**20
_PIECE_BYTES = 4 * 2**20

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_UnixTime = Annotated[
    float, Meta(ge=0, le=250_000_000_000)
]  # before the year 10000, the limit of datetime
_Word = Annotated[str, Meta(max_length=100)]


class UnreadableManifest(Exception):
    """A manifest that is invalid."""


class ForeignVersion(Exception):
    """A manifest of a format that this version does not know."""

    def __init__(self, version: object) -> None:
        super().__init__(
            f"its format is {harmless(repr(version))[:40]}, but this version reads {FORMAT}"
        )


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The expected size and hash of a checkpoint file."""

    size_bytes: _Count
    sha256: _Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a checkpoint.

    ``serial`` is set by :func:`commit`: one more than the largest of the store. It identifies the
    newest checkpoint, even after a restart from an earlier step, or if clocks differ.

    ``best`` is the value of the evaluation metric if it was the best so far when the checkpoint was
    saved: of all checkpoints with a value, the newest is the best.
    """

    name: _Word
    step: _Count
    world_size: _Ranks
    strategy: _Word
    made_unix_s: _UnixTime
    files: Mapping[str, FileRecord]
    global_batch_size: _Count | None = None
    serial: _Count = 0
    best: Mapping[_Word, float] | None = None

    @property
    def size_bytes(self) -> int:
        """The total size of its files."""
        return sum(one.size_bytes for one in self.files.values())

    def to_json(self) -> bytes:
        """Return the canonical form of this manifest, with its own hash."""
        content = {"format": FORMAT, "sha256": "", **msgspec.to_builtins(self)}
        content["files"] = dict(sorted(content["files"].items()))
        content["sha256"] = hashlib.sha256(_spelled(content)).hexdigest()
        return _spelled(content)

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Read a manifest strictly; raises :class:`UnreadableManifest` or :class:`ForeignVersion`."""
        try:
            content = decode_strictly(text, dict[str, Any])
        except ValueError as error:
            raise UnreadableManifest(f"invalid JSON: {error}") from None
        version = content.pop("format", None)
        if type(version) is not int or version != FORMAT:
            raise ForeignVersion(version)
        content.pop("sha256", None)
        try:
            manifest = msgspec.convert(content, cls, strict=True)
        except msgspec.ValidationError as error:
            raise UnreadableManifest(harmless(str(error))) from None
        for file in manifest.files:
            if not is_file_name(file) or file == MARKER:
                raise UnreadableManifest(f"it has an invalid file name, {harmless(file)[:100]!r}")
        if step_of(manifest.name) != manifest.step:
            raise UnreadableManifest("its name and its step do not match")
        if manifest.to_json() != text:
            raise UnreadableManifest("it was changed after it was written: its hash does not match")
        return manifest


def new_name(step: int) -> str:
    """Return a random name for a new checkpoint, so that none is ever overwritten."""
    return f"step-{step:08d}-{os.urandom(2).hex()}"


def write_file(
    store: Store,
    name: str,
    file: str,
    pieces: Iterable[bytes | memoryview],
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> FileRecord:
    """Write a file, hash it on the way, and verify the stored file.

    ``on_bytes`` is called for each piece that was written or read.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with store.create(name, file) as stream:
            for piece in pieces:
                digest.update(piece)
                size_bytes += stream.write(piece)
                on_bytes(len(piece))
        record = FileRecord(size_bytes=size_bytes, sha256=digest.hexdigest())
        _read_back(store, name, file, record, on_bytes)
    except OSError as error:
        raise MusterError(
            f"cannot write {file} to {store.where}/{name}",
            why=error.strerror or str(error),
            fix="free disk space there, or save to another location",
        ) from error
    return record


def _read_back(
    store: Store, name: str, file: str, record: FileRecord, on_bytes: Callable[[int], None]
) -> None:
    size_bytes = store.size(name, file) or 0
    good = size_bytes == record.size_bytes
    if good and not store.checked_on_arrival():
        good = sha256_of(store, name, file, on_bytes=on_bytes) == record.sha256
    if not good:
        raise MusterError(
            f"{file} was written to {store.where}/{name}, but reading it back gives different "
            "content",
            why=f"{record.size_bytes} bytes were written, but {size_bytes} were read"
            if size_bytes != record.size_bytes
            else "the size matches, but the hash does not: the disk, its controller or memory is "
            "faulty",
            fix="save to another location, and check the disk",
        )


def sha256_of(
    store: Store, name: str, file: str, *, on_bytes: Callable[[int], None] = lambda count: None
) -> str:
    """Return the hash of a stored file; ``on_bytes`` is called for each piece that was read."""
    digest = hashlib.sha256()
    with store.open(name, file) as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


def commit_checkpoint(store: Store, manifest: Manifest) -> Manifest:
    """Commit the files as a checkpoint: write its marker. Return the written manifest.

    All files must be visible from here: ranks that write to their own disks have not saved
    anything. Raises ValueError for a manifest that could not be read again.
    """
    sizes = store.sizes(manifest.name)
    absent = sorted(
        file for file, record in manifest.files.items() if sizes.get(file) != record.size_bytes
    )
    if absent:
        raise MusterError(
            f"cannot commit {manifest.name}: {absent[0]} is missing or differs from what was "
            "written",
            why=f"{len(absent)} of {len(manifest.files)} files are not in {store.where} as seen from this host",
            fix="save to a folder that all hosts share, or to object storage",
        )
    newest = max((one.serial for one in committed_manifests(store)), default=0)
    manifest = msgspec.structs.replace(manifest, serial=newest + 1)
    text = manifest.to_json()
    refuse_too_large(MARKER, len(text), most_bytes=_MOST_BYTES)
    try:
        Manifest.from_json(text)
    except UnreadableManifest as error:
        raise ValueError(str(error)) from None
    write_file(store, manifest.name, MARKER, [text])
    return manifest


def read_manifest(store: Store, name: str) -> Manifest | None:
    """Read a checkpoint's manifest; None if it has none: then it was not committed.

    Raises :class:`UnreadableManifest` or :class:`ForeignVersion`, and OSError or MusterError if the
    store fails.
    """
    try:
        text = read_small(store, name, MARKER, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UnreadableManifest(str(error)) from None
    manifest = Manifest.from_json(text)
    if manifest.name != name:
        raise UnreadableManifest(f"it is the manifest of {manifest.name}")
    return manifest


def committed_manifests(store: Store) -> list[Manifest]:
    """Return the readable manifests, the newest first. Their files are not checked."""
    manifests = []
    for name in store.names():
        try:
            manifest = read_manifest(store, name)
        except (UnreadableManifest, ForeignVersion, OSError):
            continue
        if manifest is not None:
            manifests.append(manifest)
    return sorted(manifests, key=lambda one: (one.serial, one.step, one.name), reverse=True)


def best_manifest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the best checkpoint by the metric of the run; None if none was marked."""
    marked = [one for one in manifests if one.best]
    return max(marked, key=lambda one: one.serial, default=None)


def now_unix_s() -> float:
    """Return the current time for a manifest."""
    return round(time.time(), 3)


def _spelled(content: Mapping[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
