"""The index of tensors and the heads of their files: read with suspicion."""

import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.checkpoints.tensor_file import (
    Axis,
    Chunk,
    FileEntry,
    Index,
    Split,
    StoredTensor,
    file_head,
    rank_file,
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


SPLIT = StoredTensor(
    dtype="F32",
    shape=(10, 3),
    split=Split(key="model.w", first_rank=4, axes=(Axis(dim=0, extent=4, stride=2),)),
)


def test_a_split_names_its_chunks() -> None:
    assert list(SPLIT.pieces()) == [
        Chunk(offset=(0, 0), shape=(4, 3), file="rank-00004.safetensors", key="model.w@0,0"),
        Chunk(offset=(4, 0), shape=(4, 3), file="rank-00006.safetensors", key="model.w@4,0"),
        Chunk(offset=(8, 0), shape=(2, 3), file="rank-00008.safetensors", key="model.w@8,0"),
    ]
    assert [one.offset[0] for one in SPLIT.pieces((4, 1), (5, 1))] == [4, 8]
    assert list(SPLIT.pieces((4, 1), (0, 1))) == []
    whole = StoredTensor(dtype="F32", shape=(), split=Split(key="step", first_rank=700))
    assert list(whole.pieces()) == [
        Chunk(offset=(), shape=(), file="ranks-00500/rank-00700.safetensors", key="step")
    ]
    index = Index(tensors={"model.w": SPLIT, "step": whole})
    assert Index.from_json(index.to_json()) == index


@given(st.data())
def test_the_chunks_of_a_split_cover_a_region_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    extents = {dim: data.draw(st.integers(1, shape[dim])) for dim in dims}
    axes = tuple(Axis(dim=dim, extent=extents[dim], stride=10**dim) for dim in dims)
    split = Split(key="w", first_rank=0, axes=axes)
    tensor = StoredTensor(dtype="U8", shape=tuple(shape), split=split)
    pieces = list(tensor.pieces())
    explicit = StoredTensor(dtype="U8", shape=tuple(shape), chunks=tuple(pieces))
    Index(
        tensors={"split": tensor, "explicit": explicit}
    ).to_json()  # refuses what does not cover it
    places = [place for one in pieces for place in _places(one.offset, one.shape)]
    assert len(set(places)) == len(places)
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    region = tuple(
        data.draw(st.integers(1, extent - begin))
        for extent, begin in zip(shape, offset, strict=True)
    )
    wanted = set(_places(offset, region))
    assert list(tensor.pieces(offset, region)) == [
        one for one in pieces if wanted & set(_places(one.offset, one.shape))
    ]
    assert sorted(one.offset for one in explicit.pieces(offset, region)) == sorted(
        one.offset for one in tensor.pieces(offset, region)
    )


def _places(offset: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    ranges = [range(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True)]
    return list(itertools.product(*ranges))


@pytest.mark.parametrize(
    ("shape", "split", "chunks"),
    [
        ([10], {"axes": [{"dim": 1, "extent": 4, "stride": 1}]}, []),
        ([10, 3], {"axes": [{"dim": 0, "extent": 4, "stride": 1}] * 2}, []),
        ([10], {"axes": [{"dim": 0, "extent": 4, "stride": 400_000}], "first_rank": 300_000}, []),
        ([2**52], {"axes": [{"dim": 0, "extent": 1, "stride": 1}]}, []),
        ([10], {}, [{"offset": [0], "shape": [10], "file": "a", "key": "w"}]),
    ],
    ids=["no such dimension", "twice", "ranks", "too many", "both"],
)
def test_what_a_split_may_not_say(
    shape: list[int], split: dict[str, Any], chunks: list[Any], snapshot: SnapshotAssertion
) -> None:
    whole = {"dtype": "F32", "shape": shape, "chunks": chunks}
    content = {"tensors": {"w": {**whole, "split": {"key": "w", "first_rank": 0, **split}}}}
    with pytest.raises(ValueError, match=r"^index\.json: w ") as refused:
        Index.from_json(json.dumps(content).encode())
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(
    "axis", [{"dim": -1}, {"dim": 64}, {"extent": 0}, {"stride": 0}, {"stride": 10**7}], ids=str
)
def test_numbers_that_no_split_has(axis: dict[str, int]) -> None:
    split = {"key": "w", "first_rank": 0, "axes": [{"dim": 0, "extent": 1, "stride": 1, **axis}]}
    content = {"tensors": {"w": {"dtype": "F32", "shape": [2], "split": split}}}
    with pytest.raises(ValueError, match=r"^cannot read index\.json: Expected `int`"):
        Index.from_json(json.dumps(content).encode())


def test_an_index_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Expected `str` of length <= 2000"):
        Index(tensors={"w" * 2001: TENSOR}).to_json()
    monkeypatch.setattr("torchmuster.checkpoints.tensor_file._MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"^index\.json is larger than 100 bytes$"):
        INDEX.to_json()
    monkeypatch.setattr("torchmuster.checkpoints.tensor_file._MOST_HEAD_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        file_head([("a" * 200, "F32", (2, 2))])


def test_an_index_does_not_grow_with_the_ranks() -> None:
    def size_bytes(ranks: int) -> int:
        axes = (Axis(dim=0, extent=2**20 // ranks, stride=1),)
        split = Split(key="w", first_rank=0, axes=axes)
        tensor = StoredTensor(dtype="F32", shape=(2**20, 8), split=split)
        return len(Index(tensors={"w": tensor}).to_json())

    assert size_bytes(2**17) <= size_bytes(2)


def test_few_files_are_in_one_folder() -> None:
    folders = Counter(rank_file(rank).rpartition("/")[0] for rank in range(20_000))
    assert max(folders.values()) == 500
    assert len(folders) == 40
    assert rank_file(499, ".json") == "rank-00499.json"
    assert rank_file(123_456) == "ranks-123000/rank-123456.safetensors"


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
