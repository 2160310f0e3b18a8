"""The manifest of a checkpoint: everything but its tensors, and the files with size and hash. Written last.

A folder without a manifest is not a checkpoint. A manifest contains its own hash, so that a single
changed bit is detected here too.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchmuster.checkpoints.store import (
    MARKER,
    Store,
    decode_strictly,
    is_file_name,
    step_of,
)
from torchmuster.errors import MusterError
from torchmuster.redaction import harmless

FORMAT = 1
_MOST_BYTES = 2**30  # the random states of a rank take about 15 kB
_PIECE_BYTES = 4 * 2**20  # read at once; from object storage, each is a request

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Ranks = Annotated[int, Meta(ge=1, le=10**6)]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_UnixTime = Annotated[float, Meta(ge=0, le=250_000_000_000)]  # before the year 10000
_Text = Annotated[str, Meta(max_length=100)]


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

    ``serial`` is one more than the largest of the store: it identifies the newest checkpoint, even
    after a restart from an earlier step, or if clocks differ. ``best`` is the value of the
    evaluation metric if it was the best so far when the checkpoint was saved: of all checkpoints
    with a value, the newest is the best. ``state`` is the training state with names in place of
    tensors, ``tied`` maps other names of a tensor to the name in the files, and ``own`` has each
    rank's own state.
    """

    name: _Text
    step: _Count
    world_size: _Ranks
    strategy: _Text
    made_unix_s: _UnixTime
    files: Mapping[str, FileRecord]
    global_batch_size: _Count | None = None
    serial: _Count = 0
    best: Mapping[_Text, float] | None = None
    versions: Mapping[_Text, _Text] = {}
    tied: Mapping[str, str] = {}
    state: Any = None
    own: tuple[Any, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The total size of its files."""
        return sum(record.size_bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Return this manifest with its own hash; ValueError if :meth:`from_json` would refuse it."""
        text = _sealed(msgspec.json.encode(self))
        try:
            self.from_json(text)
        except UnreadableManifest as error:
            raise ValueError(str(error)) from None
        return text

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Read a manifest strictly; raises :class:`UnreadableManifest` or :class:`ForeignVersion`."""
        try:
            version = decode_strictly(text, _Version).format
            if type(version) is not int or version != FORMAT:
                raise ForeignVersion(version)
            content = bytes(decode_strictly(text, _Sealed).manifest)
            if _sealed(content) != text:
                raise ValueError("it was changed after it was written: its hash does not match")
            manifest = decode_strictly(content, cls)
        except ValueError as error:
            raise UnreadableManifest(str(error)) from None
        for file in manifest.files:
            if not is_file_name(file) or file == MARKER:
                raise UnreadableManifest(f"it has an invalid file name, {harmless(file)[:100]!r}")
        if step_of(manifest.name) != manifest.step:
            raise UnreadableManifest("its name and its step do not match")
        return manifest


class _Version(msgspec.Struct):
    format: Any = None


class _Sealed(msgspec.Struct):
    manifest: msgspec.Raw


def _sealed(content: bytes) -> bytes:
    """Return the file of a manifest: its format, its hash, and the manifest itself."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return b'{"format":%d,"sha256":"%s","manifest":%s}\n' % (FORMAT, digest, content)


def new_name(step: int) -> str:
    """Return a random name for a new checkpoint, so that none is ever overwritten."""
    return f"step-{step:08d}-{os.urandom(2).hex()}"


def sha256_of(store: Store, name: str, file: str, size_bytes: int) -> str:
    """Return the hash of a stored file of this size."""
    digest = hashlib.sha256()
    for begin in range(0, size_bytes, _PIECE_BYTES):
        digest.update(store.read(name, file, begin, min(begin + _PIECE_BYTES, size_bytes)))
    return digest.hexdigest()


def commit_checkpoint(store: Store, manifest: Manifest) -> Manifest:
    """Commit the files as a checkpoint: write its manifest. Return the written manifest.

    All files must be visible from here: ranks that write to their own disks have not saved
    anything. Raises ValueError for a manifest that could not be read again.
    """
    sizes = store.sizes(manifest.name)
    absent = [
        file for file, record in manifest.files.items() if sizes.get(file) != record.size_bytes
    ]
    if absent:
        raise MusterError(
            f"cannot commit {manifest.name}: {absent[0]} is missing or differs from what was written",
            why=f"{len(absent)} of {len(manifest.files)} files are not in {store.where} as seen from rank 0",
            fix="save to a folder that all hosts share, or to object storage",
        )
    newest = max((other.serial for other in committed_manifests(store)), default=0)
    manifest = msgspec.structs.replace(manifest, serial=newest + 1)
    store.write(manifest.name, MARKER, manifest.to_json())
    return manifest


def read_manifest(store: Store, name: str) -> Manifest | None:
    """Read a checkpoint's manifest; None if it has none: then it was not committed.

    Raises :class:`UnreadableManifest` or :class:`ForeignVersion`, and OSError or MusterError if the
    store fails.
    """
    sizes = store.sizes(name)
    if MARKER not in sizes:
        return None
    size_bytes = sizes[MARKER] or 0
    if size_bytes > _MOST_BYTES:
        raise UnreadableManifest(f"{MARKER} is larger than {_MOST_BYTES} bytes")
    text = store.read(name, MARKER, 0, size_bytes)
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
    return sorted(manifests, key=lambda other: (other.serial, other.step, other.name), reverse=True)


def best_manifest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the best checkpoint by the metric of the run; None if none was marked."""
    marked = [manifest for manifest in manifests if manifest.best]
    return max(marked, key=lambda manifest: manifest.serial, default=None)
