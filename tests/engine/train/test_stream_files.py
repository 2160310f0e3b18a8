"""Files of lines as samples: each line once, damage named, storage that fails tried again."""

import bz2
import gzip
import itertools
import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.streams import files as reading_files
from torchmuster.train.data.streams.files import Files
from torchmuster.train.data.streams.reading import Source

pytestmark = pytest.mark.engine


def everything(source: Source, epoch: int = 0) -> list[Any]:
    lanes = list(range(source.lanes()))
    opened = source.open(lanes, epoch=epoch, cursors={})
    try:
        return [one for lane in opened.values() for one in lane.read(10**6)]
    finally:
        for lane in opened.values():
            lane.close()


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(["", "a", "ü", "word", "a long line of words"]), max_size=9),
        min_size=1,
        max_size=4,
    ),
    ends=st.sampled_from(["\n", "\r\n"]),
    closed=st.booleans(),
    lanes=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_every_line_belongs_to_one_lane(
    contents: list[list[str]], ends: str, closed: bool, lanes: int, epoch: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, lines in enumerate(contents):
            text = ends.join(lines) + (ends if closed else "")
            (Path(folder) / f"{number}.txt").write_bytes(text.encode())
        source = Files(f"{folder}/*.txt", lanes=lanes)
        lines = [line for one in contents for line in one if line]
        assert sorted(everything(source, epoch)) == sorted(lines)
        for lane in range(lanes):
            whole = source.open([lane], epoch=epoch, cursors={})[lane]
            samples = whole.read(100)
            whole.close()
            for stop in range(len(samples)):
                first = source.open([lane], epoch=epoch, cursors={})[lane]
                first.read(stop)
                cursor = json.loads(json.dumps(first.cursor()))
                first.close()
                second = source.open([lane], epoch=epoch, cursors={lane: cursor})[lane]
                assert second.read(100) == samples[stop:]
                second.close()


def test_compressed_files_and_kinds_by_their_names(tmp_path: Path) -> None:
    records = [{"text": f"täxt {one}", "n": one} for one in range(30)]
    lines = "".join(json.dumps(one) + "\n" for one in records).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "d.ndjson.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "notes.md").write_text("not a sample")
    source = Files(str(tmp_path), lanes=7)  # a folder: what can be read of it
    numbers = sorted(one["n"] for one in everything(source))
    assert numbers == sorted(list(range(30)) * 4)
    assert "4 files, shuffled by 0, digest" in source.identity()


def test_a_compressed_file_goes_on_in_its_middle(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(50))))
    source = Files(f"{tmp_path}/a.txt.gz", lanes=1)
    first = source.open([0], epoch=0, cursors={})[0]
    assert first.read(20) == [str(one) for one in range(20)]
    second = source.open([0], epoch=0, cursors={0: first.cursor()})[0]
    assert second.read(50) == [str(one) for one in range(20, 50)]
    first.close()
    second.close()


def test_the_order_of_files_changes_with_the_epoch_unless_told_otherwise(tmp_path: Path) -> None:
    for one in range(8):
        (tmp_path / f"{one}.txt").write_text(f"{one}\n")
    source = Files(f"{tmp_path}/*.txt", lanes=1)
    assert everything(source, 0) == everything(source, 0) != everything(source, 1)
    plain = Files(f"{tmp_path}/*.txt", lanes=1, shuffle=False)
    assert everything(plain, 0) == everything(plain, 1) == [str(one) for one in range(8)]


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(MusterError, match=r"a\.jsonl: line 1 is not JSON"):
        everything(Files(f"{tmp_path}/a.jsonl", lanes=1), 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            b'{"n": 1}\n{"n": 2\n{"n": 3}\n',
            "a.jsonl: line 2 is not JSON\n"
            "Expecting ',' delimiter: line 2 column 1 (char 8)\n"
            "fix or remove that line; each line holds one complete JSON value",
        ),
        (
            "a.jsonl",
            b'{"n": 1}\n{"n": 2',
            "a.jsonl: line 2 is not JSON\n"
            "Expecting ',' delimiter: line 1 column 8 (char 7), and it is the last line: the file may "
            "be truncated\n"
            "fix or remove that line; each line holds one complete JSON value",
        ),
        (
            "a.txt",
            b"good\n\n\xff\xfe\n",
            "a.txt: line 3 is not text in UTF-8\n"
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte\n"
            "fix or remove that line, or rewrite the file as UTF-8",
        ),
        (
            "a.txt.gz",
            gzip.compress(bytes(range(32, 127)) * 3 + b"\n" + bytes(range(33, 127)))[:-20],
            "the compressed file is damaged after byte 0\n"
            "EOFError: Compressed file ended before the end-of-stream marker was reached\n"
            "copy or download the file again; it is probably truncated",
        ),
        (
            "a.txt.gz",
            b"not gzip",
            "the compressed file is damaged after byte 0\nBadGzipFile: Not a gzipped file (b'no')\n"
            "copy or download the file again; it is probably truncated",
        ),
        (
            "a.txt.bz2",
            b"not bzip2",
            "the compressed file is damaged after byte 0\nOSError: Invalid data stream\n"
            "copy or download the file again; it is probably truncated",
        ),
    ],
)
def test_damage_is_named_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for lanes in (1, 3):
        with pytest.raises(MusterError) as damaged:
            everything(Files(f"{tmp_path}/{name}", lanes=lanes))
        assert str(damaged.value).endswith(said), str(damaged.value)
        assert str(tmp_path / name) in damaged.value.what


def test_damage_comes_whole_out_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\nthree\n")
    loader = StreamLoader(
        Files(f"{tmp_path}/a.jsonl"), made_up_world(), global_batch_size=2, workers=1
    )
    with pytest.raises(MusterError) as damaged:
        list(loader.epoch(0))
    assert damaged.value.what == f"{tmp_path}/a.jsonl: line 3 is not JSON"
    assert damaged.value.fix.startswith("fix or remove that line")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "{folder}/*.jsonl",
            "no files at {folder}/*.jsonl\n"
            "searched for .txt, .jsonl, .ndjson, .json, .parquet, .csv files, including compressed ones\n"
            "check the path; quote a pattern such as data/*.jsonl",
        ),
        ("{folder}/missing.txt", "no files at {folder}/missing.txt\n"),
        ("{folder}", "{folder}/a.parquet is a table, "),
        ("{folder}/*", "{folder}/b.bin: unsupported file type\n"),
        ("nowhere://bucket/a.txt", "cannot read files at nowhere://\nProtocol not known"),
    ],
)
def test_what_is_not_there_or_not_readable_is_said(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(Impossible) as refused:
        Files(place.format(folder=tmp_path))
    assert str(refused.value).startswith(said.format(folder=tmp_path)), str(refused.value)


def test_s3_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(Impossible) as refused:
        Files("s3://bucket/a.jsonl")
    assert refused.value.fix == "pip install 'torchmuster[s3]'"
    assert refused.value == snapshot


def test_storage_that_fails_is_tried_again_and_given_up_with_the_password_hidden(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    storage = MemoryFileSystem()
    storage.pipe("/flaky/a.txt", b"".join(b"%d\n" % one for one in range(100)))
    source = Files("memory://flaky/a.txt", lanes=2)
    failures = itertools.cycle([True, True, False])
    lasting = False
    pauses: list[float] = []
    opened = reading_files.open_file

    def flaky(*arguments: Any) -> Any:
        if lasting or next(failures):
            raise OSError(104, "reset by https://ana:secret-word@storage.example")
        return opened(*arguments)

    monkeypatch.setattr(reading_files, "open_file", flaky)
    monkeypatch.setattr("time.sleep", pauses.append)
    assert sorted(map(int, everything(source))) == list(range(100))
    assert pauses == [0.5, 1.0] * 2
    lasting = True
    with pytest.raises(MusterError) as given_up:
        everything(source)
    storage.rm("/flaky", recursive=True)
    assert "secret-word" not in str(given_up.value)
    assert "reset by https://" in given_up.value.why
    assert given_up.value == snapshot
