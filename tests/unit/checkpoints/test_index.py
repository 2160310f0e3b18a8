"""The index of tensors and the heads of their files: read with suspicion."""

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.checkpoints.index import Chunk, Index, StoredTensor
from torchmuster.checkpoints.tensor_file import Entry, head, read_head

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
    ("way", "value", "told"),
    [
        (("dtype",), "F3", "is of an unknown type, 'F3'"),
        (("shape",), [4, 3], "has 12 elements, its pieces have 8"),
        (("shape",), [4], "has a piece that lies outside of it"),
        (("shape",), [2**70, 2], "cannot be read: Expected `int` <= 9007199254740992"),
        (("shape",), [-4, -2], "cannot be read: Expected `int` >= 0"),
        (("shape",), [1] * 65, "cannot be read: Expected `array` of length <= 64"),
        (("chunks",), [], "has 8 elements, its pieces have 0"),
        (("chunks", 0, "offset"), [2, 0], "has a piece that lies outside of it"),
        (("chunks", 0, "offset"), [0], "has a piece that lies outside of it"),
        (("chunks", 0, "file"), "../../secret", "'../../secret', which is not a file's name"),
        (("chunks", 0, "file"), ".x", "is said to be in '.x', which is not a file's name"),
    ],
)
def test_what_an_index_may_not_say(way: tuple[Any, ...], value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^index\.json") as refused:
        Index.from_json(_altered("tensors", "model.w", *way, value=value))
    assert told in str(refused.value)


def test_a_tied_name_needs_its_tensor() -> None:
    with pytest.raises(
        ValueError, match=r"^index\.json: model\.head is tied to what is not there$"
    ):
        Index.from_json(_altered("tied", "model.head", value="model.x"))


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_anything_else_is_refused_in_words(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^index\.json cannot be read"):
        Index.from_json(text)


def test_a_head_tells_where_tensors_lie() -> None:
    beginning = head([("a", "F32", (2, 2)), ("b", "I64", ())], metadata={"format": "pt"})
    assert len(beginning) % 8 == 0
    content = beginning + bytes(24)
    place = len(beginning)
    assert read_head(io.BytesIO(content), len(content)) == {
        "a": Entry(dtype="F32", shape=(2, 2), begin=place, end=place + 16),
        "b": Entry(dtype="I64", shape=(), begin=place + 16, end=place + 24),
    }


def _file(**tensor: Any) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **tensor}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it does not begin as a safetensors file"),
        (b"\xff" * 20, "it does not begin as a safetensors file"),
        ((10**7).to_bytes(8, "little") + b"{}", "it does not begin as a safetensors file"),
        ((4).to_bytes(8, "little") + b"\x80\x04}.", "its head cannot be read"),
        ((4).to_bytes(8, "little") + b"[[[[", "its head cannot be read"),
        (_file(dtype="X"), "w is of a type that is not known here"),
        (_file(shape=[3]), "w has a shape that does not fit its size"),
        (_file(shape=[-2]), r"its head cannot be read: Expected `int` >= 0"),
        (_file(shape=[1] * 65), r"its head cannot be read: Expected `array` of length <= 64"),
        (_file(data_offsets=[8, 16]), "w is said to lie outside of the file"),
        (_file(data_offsets=[-8, 0]), "w is said to lie outside of the file"),
        (_file(data_offsets=[8, 0]), "w is said to lie outside of the file"),
        (_file(more=1), "its head cannot be read: Object contains unknown field `more`"),
    ],
)
def test_what_a_head_may_not_say(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        read_head(io.BytesIO(content), len(content))


# {} is a head, of no tensors.
@given(st.binary(max_size=200).filter(lambda one: b"".join(one.split()) != b"{}"))
@settings(max_examples=100)
def test_a_strange_head_is_a_value_error(content: bytes) -> None:
    text = len(content).to_bytes(8, "little") + content
    with pytest.raises(ValueError, match=r"head cannot be read|begin as"):
        read_head(io.BytesIO(text), len(text))
