"""Manifests: one spelling, strict reading, and the marker last."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from made_up_checkpoints import SHARD, save, write
from torchmuster.checkpoints.manifest import (
    MARKER,
    FileRecord,
    ForeignVersion,
    Manifest,
    UnreadableManifest,
    commit_checkpoint,
    read_manifest,
)
from torchmuster.checkpoints.store import FolderStore
from torchmuster.errors import MusterError

RECORD = FileRecord(size_bytes=3, sha256="ab" * 32)
GOOD = Manifest(
    name="step-00000120-7f3a",
    step=120,
    world_size=4,
    strategy="fsdp",
    global_batch_size=64,
    made_unix_s=1769860800.25,
    files={"b.json": RECORD, "a.json": RECORD},
    serial=7,
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_json(GOOD.to_json()) == GOOD
    assert Manifest.from_json(GOOD.to_json()).size_bytes == 6
    best = msgspec.structs.replace(GOOD, best={"loss": 0.25}, state={"a": [1, 2.5]}, own=({},))
    assert Manifest.from_json(best.to_json()) == best


@given(st.integers(0, 8 * len(GOOD.to_json()) - 1))
@settings(max_examples=400)
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    text = bytearray(GOOD.to_json())
    text[bit // 8] ^= 1 << bit % 8
    with pytest.raises((UnreadableManifest, ForeignVersion)):
        Manifest.from_json(bytes(text))


def _altered(*, version: object = 1, **changes: Any) -> bytes:
    """A manifest by somebody who knows how the hash is made."""
    content = json.dumps(json.loads(GOOD.to_json())["manifest"] | changes, ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    head = f'{{"format":{json.dumps(version)},"sha256":"{digest}","manifest":'
    return f"{head}{content}}}\n".encode()


HOSTILE = json.loads(GOOD.to_json())["manifest"]["files"]["a.json"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": {"../../etc/passwd": HOSTILE}}, r"invalid file name, '\.\./\.\./etc/passwd'"),
        ({"files": {"/etc/passwd": HOSTILE}}, "invalid file name"),
        ({"files": {"\x1b[2J": HOSTILE}}, "invalid file name, '�"),
        ({"files": {MARKER: HOSTILE}}, "invalid file name, 'manifest.json'"),
        ({"files": {"a": {**HOSTILE, "size_bytes": -1}}}, "Expected `int` >= 0"),
        ({"files": {"a": {**HOSTILE, "sha256": "zz"}}}, "matching regex"),
        ({"world_size": 0}, "Expected `int` >= 1"),
        ({"step": 2**80}, r"Expected `int` <="),
        ({"step": 121}, "name and its step"),
        ({"name": "../x"}, "name and its step"),
        ({"unheard_of": 1}, "unknown field `unheard_of`"),
        ({"made_unix_s": "now"}, "Expected `float`"),
        ({"made_unix_s": 1e300}, "Expected `float` <= "),
        ({"made_unix_s": -1.0}, "Expected `float` >= 0"),
    ],
)
def test_what_a_manifest_may_not_say(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnreadableManifest, match=told):
        Manifest.from_json(_altered(**changes))


@pytest.mark.parametrize(
    "change",
    [{"strategy": "x" * 101}, {"world_size": 10**6 + 1}, {"best": {"loss" * 30: 1.0}}],
    ids=str,
)
def test_what_no_reader_would_accept_is_not_committed(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    store = FolderStore(tmp_path)
    manifest = msgspec.structs.replace(write(store, 5), **change)
    with pytest.raises(ValueError, match="Expected"):
        commit_checkpoint(store, manifest)
    assert MARKER not in store.sizes(manifest.name)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\x80\x04}", b"[" * 100_000, b"null"])
def test_what_is_not_a_manifest(text: bytes) -> None:
    with pytest.raises(UnreadableManifest):
        Manifest.from_json(text)


def test_without_its_marker_it_is_not_committed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    manifest = write(store, 5)
    assert read_manifest(store, manifest.name) is None
    written = commit_checkpoint(store, manifest)
    assert read_manifest(store, manifest.name) == written
    assert written.serial == 1
    assert save(store, 3).serial == 2  # later, although its step is smaller


def test_files_that_are_elsewhere_are_not_committed(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    store = FolderStore(tmp_path)
    manifest = write(store, 5)
    (tmp_path / manifest.name / SHARD.format(2)).unlink()
    with pytest.raises(MusterError) as refused:
        commit_checkpoint(store, manifest)
    assert SHARD.format(2) in refused.value.what
    text = str(refused.value).replace(manifest.name, "NAME").replace(str(tmp_path), "FOLDER")
    assert text == snapshot
    assert read_manifest(store, manifest.name) is None


def test_a_marker_of_another_checkpoint_counts_for_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    one, other = save(store, 5), save(store, 6)
    (tmp_path / one.name / MARKER).write_bytes((tmp_path / other.name / MARKER).read_bytes())
    with pytest.raises(UnreadableManifest, match=f"^it is the manifest of {other.name}$"):
        read_manifest(store, one.name)
