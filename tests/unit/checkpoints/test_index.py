"""The index of tensors and the heads of their files: read with suspicion."""

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.checkpoints.tensor_file import (
    Chunk,
    FileEntry,
    Index,
    StoredTensor,
    file_head,
    read_file_head,
)

TENSOR = StoredTensor(
    dtype="BF16",
    shape=(4, 2),
    chunks=(
        Chunk(offset=(0, 0), shape=(3, 2), file="rank-00000.safetensors", key="w@0"),
        Chunk(offset=(3, 0), shape=(1, 2), file="rank-00001.safetensors", key="w@1"),
    ),
)
INDEX = Index(tensors={"model.w": TENSOR}, tied={"model.head": "model.w"})


def test_an_index_comes_back_as_it_was() -> None:
    assert Index.from_json(INDEX.to_json()) == INDEX
    assert TENSOR.size_bytes == 16


def _altered(*way: Any, value: Any) -> bytes:
    content = json.loads(INDEX.to_json())
    part = content
    for key in way[:-1]:
        part = part[key]
    part[way[-1]] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("dtype",), "F3"),
        (("shape",), [4, 3]),
        (("shape",), [4]),
        (("chunks",), []),
        (("chunks", 0, "offset"), [2, 0]),
        (("chunks", 0, "offset"), [0]),
        (("chunks", 0, "file"), "../../secret"),
        (("chunks", 0, "file"), ".x"),
    ],
    ids=str,
)
def test_what_an_index_may_not_say(
    way: tuple[Any, ...], value: Any, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValueError, match=r"^index\.json: model\.w ") as refused:
        Index.from_json(_altered("tensors", "model.w", *way, value=value))
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ([2**70, 2], "Expected `int` <= 9007199254740992"),
        ([-4, -2], "Expected `int` >= 0"),
        ([1] * 65, "Expected `array` of length <= 64"),
    ],
    ids=["too large", "below zero", "too many"],
)
def test_what_is_no_shape(shape: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=rf"^cannot read index\.json: {told}"):
        Index.from_json(_altered("tensors", "model.w", "shape", value=shape))


def test_a_tied_name_needs_its_tensor(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError, match=r"^index\.json: model\.head ") as refused:
        Index.from_json(_altered("tied", "model.head", value="model.x"))
    assert str(refused.value) == snapshot


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_anything_else_is_refused_in_words(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^cannot read index\.json"):
        Index.from_json(text)


def test_a_head_tells_where_tensors_lie() -> None:
    beginning = file_head([("a", "F32", (2, 2)), ("b", "I64", ())], metadata={"format": "pt"})
    assert len(beginning) % 8 == 0
    content = beginning + bytes(24)
    place = len(beginning)
    assert read_file_head(io.BytesIO(content), len(content)) == {
        "a": FileEntry(dtype="F32", shape=(2, 2), begin=place, end=place + 16),
        "b": FileEntry(dtype="I64", shape=(), begin=place + 16, end=place + 24),
    }


def _file(**tensor: Any) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **tensor}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff" * 20, id="bytes"),
        pytest.param((10**7).to_bytes(8, "little") + b"{}", id="too long"),
        pytest.param(_file(dtype="X"), id="dtype"),
        pytest.param(_file(shape=[3]), id="shape"),
        pytest.param(_file(data_offsets=[8, 16]), id="behind the end"),
        pytest.param(_file(data_offsets=[-8, 0]), id="before the beginning"),
        pytest.param(_file(data_offsets=[8, 0]), id="end before beginning"),
    ],
)
def test_what_a_head_may_not_say(content: bytes, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read_file_head(io.BytesIO(content), len(content))
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ((4).to_bytes(8, "little") + b"\x80\x04}.", ""),
        ((4).to_bytes(8, "little") + b"[[[[", ""),
        (_file(shape=[-2]), "Expected `int` >= 0"),
        (_file(shape=[1] * 65), "Expected `array` of length <= 64"),
        (_file(more=1), "unknown field `more`"),
    ],
    ids=["pickle", "open lists", "below zero", "too many", "unknown field"],
)
def test_a_head_that_cannot_be_read(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^cannot read its header.*{told}"):
        read_file_head(io.BytesIO(content), len(content))


# {} is a head, of no tensors.
@given(st.binary(max_size=200).filter(lambda one: b"".join(one.split()) != b"{}"))
@settings(max_examples=100)
def test_a_strange_head_is_a_value_error(content: bytes) -> None:
    text = len(content).to_bytes(8, "little") + content
    with pytest.raises(ValueError, match=r"cannot read its header|not a safetensors file"):
        read_file_head(io.BytesIO(text), len(text))
