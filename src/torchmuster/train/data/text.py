"""Text as rows of tokens for a language model, from files or from a dataset."""

import glob
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchmuster.errors import Impossible
from torchmuster.runfolder import user_cache
from torchmuster.train.data.formats import WHOLE, RecordFormat, RecordTokenizer, Tokenizer
from torchmuster.train.data.prepared import (
    PreparedRows,
    open_prepared,
    prepare_rows,
    prepared_path,
)
from torchmuster.train.data.records import Record, read_records, records_of
from torchmuster.train.data.streams.files import File, Files, find_files
from torchmuster.train.data.streams.iterable import HuggingFaceStream, Indexed
from torchmuster.train.data.streams.packing import PackedRows, PaddedRows, Row, row_of
from torchmuster.train.data.streams.reading import Source
from torchmuster.train.data.streams.tokenizing import (
    ByteTokenizer,
    Tokenized,
    TransformersTokenizer,
    tokenizer_digest,
)

INSTALL = "pip install 'torchmuster[datasets]'"


def open_dataset(
    name_or_path: str,
    split: str,
    *,
    config_name: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
) -> Any:
    """Open a dataset: a folder that ``save_to_disk`` wrote, a folder of files, or a name on the hub."""
    datasets = _datasets("datasets by name or folder need")
    folder = Path(name_or_path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            found = _one_of(datasets.load_from_disk(str(folder)), name_or_path, split)
            return found.to_iterable_dataset() if streaming else found
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else name_or_path,
            config_name,
            split=split,
            revision=revision,
            streaming=streaming,
        )
    except (OSError, ValueError) as error:
        raise Impossible(
            f"cannot open the dataset {name_or_path!r}, split {split!r}",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="set the path of a folder, or the name of a dataset on the hub; without network "
            "access, download it "
            f"on another host: hf download --repo-type dataset {name_or_path} --local-dir FOLDER",
        ) from error


def _open_tables(files: Sequence[File]) -> Any:
    """Open Parquet or CSV files as one dataset."""
    datasets = _datasets(f"{files[0].shown}: tables need")
    kind = "parquet" if files[0].place.endswith(".parquet") else "csv"
    return datasets.load_dataset(kind, data_files=[one.place for one in files], split="train")


def _datasets(needed: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise Impossible(
            f"{needed} the package datasets, which is not installed", why=str(error), fix=INSTALL
        ) from error
    return datasets


def _one_of(found: Any, name: str, split: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise Impossible(
            f"the dataset {name!r} has no split {split!r}",
            why=f"it has {', '.join(found)}",
            fix="set data.split to one of them",
        )
    return found[split]


def write_tokens(path: str | Path, documents: Iterable[Sequence[int]], *, end: int) -> int:
    """Write documents as one token file; return its number of tokens, end tokens included."""
    ids = array("i")
    for document in documents:
        ids.extend(document)
        ids.append(end)
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    if not ids or int(tokens.max()) < 2**16:
        tokens = tokens.to(torch.uint16)  # half the bytes, for vocabularies below 65536
    save_file({"tokens": tokens}, str(path), metadata={"end": str(end)})
    return len(ids)


class TokenRows(torch.utils.data.Dataset[Row]):
    """Token files as a map-style dataset of packed rows, for ``BatchLoader``. No token is lost.

    Rows are consecutive in a file; the last row of each file is padded. ``places`` are local paths
    or patterns.
    """

    def __init__(self, places: str | Sequence[str], *, sequence_length: int) -> None:
        wanted = [places] if isinstance(places, str) else places
        self._paths = sorted({path for place in wanted for path in glob.glob(place)})  # noqa: PTH207  # whole patterns, not below a folder
        if not self._paths:
            raise Impossible(
                f"no token files at {', '.join(wanted)}",
                why="searched for .safetensors files with a tensor named tokens, on this host",
                fix="check the path, or create the files with write_tokens()",
            )
        self._length = sequence_length
        self._opened: dict[int, Any] = {}
        sizes, self._ends = [], []
        for path in self._paths:
            size, end = _looked_into(path)
            sizes.append(size)
            self._ends.append(end)
        self._sizes = sizes
        self._first_rows = list(
            accumulate((-(-size // sequence_length) for size in sizes), initial=0)
        )

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = bisect_right(self._first_rows, index) - 1
        begin = (index - self._first_rows[place]) * self._length
        # The previous token shows whether the row begins with a document.
        before = max(begin - 1, 0)
        tokens = self._tokens(place)[before : begin + self._length].long()
        ends = (tokens == self._ends[place]).nonzero().flatten() + 1 - (begin - before)
        tokens = tokens[begin - before :]
        begins = [one for one in ends.tolist() if one < len(tokens)]
        return row_of(tokens, begins if begin else [0, *begins], self._length, masked=False)

    def _tokens(self, place: int) -> Any:
        """Open a file on first use, in the process that uses it."""
        if place not in self._opened:
            file = safe_open(self._paths[place], framework="pt")
            self._opened[place] = file.get_slice("tokens")  # type: ignore[no-untyped-call]
        return self._opened[place]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


def _looked_into(path: str) -> tuple[int, int]:
    """Return how many tokens a file has, and its end token."""
    try:
        with safe_open(path, framework="pt") as file:
            (size,) = file.get_slice("tokens").get_shape()
            return size, int((file.metadata() or {})["end"])
    except Exception as error:  # safetensors has an error of its own, and others
        raise Impossible(
            f"{path} is not a token file",
            why=f"{type(error).__name__}: {error}",
            fix="create it with write_tokens()",
        ) from None


_TOKEN_FILES = ".safetensors"  # noqa: S105  # tokens of text, and no secret


def holds_tokens(places: str | Sequence[str] | None) -> bool:
    """Return whether files hold tokens rather than text."""
    named = [places] if isinstance(places, str) else places or ()
    return bool(named) and all(one.endswith(_TOKEN_FILES) for one in named)


class FileData:
    """Records in files: lines, Parquet or CSV."""

    is_stream = False

    def __init__(self, places: str | Sequence[str]) -> None:
        self._places = places

    def records(self) -> Iterator[Record]:
        """Yield all records, with their file and line."""
        return read_records(self._places)

    def identity(self) -> list[tuple[str, int, str]]:
        """Return what changes if a file does."""
        return [(one.place, one.size_bytes, one.version) for one in find_files(self._places, {})]

    def source(self, rows: "TextRows") -> Source:
        """Return the records as a source of lanes."""
        files = find_files(self._places, {})
        if files[0].is_table:
            return Indexed(_open_tables(files), seed=rows.seed, shuffle=rows.shuffle)
        return Files(self._places, seed=rows.seed, shuffle=rows.shuffle)


class DatasetData:
    """Records of a Hugging Face dataset, map-style or iterable."""

    def __init__(self, dataset: Any, name: str = "dataset") -> None:
        self._dataset = dataset
        self._name = name
        self.is_stream = not hasattr(dataset, "__len__")

    def records(self) -> Iterator[Record]:
        """Yield all records, with their number."""
        return records_of(self._dataset, self._name)

    def identity(self) -> list[object]:
        """Return what changes if the dataset does: its size, its files, else its first record."""
        files = [Path(one["filename"]) for one in getattr(self._dataset, "cache_files", ())]
        known = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
        return [self._name, len(self._dataset), *(known or [self._dataset[0]])]

    def source(self, rows: "TextRows") -> Source:
        """Return the records as a source of lanes."""
        if self.is_stream:
            return HuggingFaceStream(self._dataset)
        return Indexed(self._dataset, seed=rows.seed, shuffle=rows.shuffle)


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """How records become rows: format, tokenizer, length, packed or padded, order."""

    tokenizer: Tokenizer | None  # None if files hold tokens already
    sequence_length: int
    pack: bool = True
    how: RecordFormat = field(default_factory=RecordFormat)
    seed: int = 0
    shuffle: bool = True

    def in_order(self) -> "TextRows":
        """Return the same settings without shuffling, for evaluation."""
        return replace(self, shuffle=False)

    def of_files(self, places: str | Sequence[str]) -> Source | TokenRows | PreparedRows:
        """Return the rows of files; a file that already holds tokens is used as it is."""
        if holds_tokens(places):
            return TokenRows(places, sequence_length=self.sequence_length)
        return self.of_data(FileData(places))

    def of_dataset(self, dataset: Any, name: str = "dataset") -> Source | PreparedRows:
        """Return the rows of a Hugging Face dataset, map-style or iterable."""
        return self.of_data(DatasetData(dataset, name))

    def of_data(
        self, data: FileData | DatasetData, say: Callable[[str], None] = lambda text: None
    ) -> Source | PreparedRows:
        """Return the rows of records; chats and completions are prepared first."""
        assert self.tokenizer is not None, "text needs a tokenizer"
        whole = self.how.kind in WHOLE
        if whole and not data.is_stream:
            return self._prepared(data, say)
        documents = Tokenized(
            data.source(self), self.tokenizer, how=self.how, length=self.sequence_length
        )
        documents.check_first()
        laid_out = PackedRows if self.pack else PaddedRows
        return laid_out(
            documents, sequence_length=self.sequence_length, end=self.tokenizer.end, whole=whole
        )

    def _prepared(self, data: FileData | DatasetData, say: Callable[[str], None]) -> PreparedRows:
        assert self.tokenizer is not None
        layout = {"sequence_length": self.sequence_length, "pack": self.pack}
        convert = RecordTokenizer(self.how, self.tokenizer)
        path = prepared_path(
            user_cache("data"),
            data.identity(),
            asdict(self.how),
            layout,
            tokenizer_digest(self.tokenizer),
        )
        found = open_prepared(path, sequence_length=self.sequence_length, pack=self.pack)
        if found is not None:
            return found
        prepare_rows(
            path,
            data.records(),
            convert,
            self.tokenizer,
            sequence_length=self.sequence_length,
            pack=self.pack,
            say=say,
        )
        return PreparedRows(path, sequence_length=self.sequence_length, pack=self.pack)


def tokenizer_named(name_or_path: str, *, chat_template: str | None = None) -> Tokenizer:
    """Return a tokenizer by name: ``bytes``, a folder, or one on the hub."""
    if name_or_path == "bytes":
        return ByteTokenizer()
    return TransformersTokenizer(name_or_path, chat_template=chat_template)
