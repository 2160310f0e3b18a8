"""Text as rows of tokens for a language model. Hugging Face ``datasets`` reads, maps and caches it."""

import hashlib
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from torchmuster.config.here import matching_files
from torchmuster.errors import Impossible, MusterError, first_line
from torchmuster.train.data.formats import (
    WHOLE,
    RecordFormat,
    RecordTokenizer,
    Tokens,
    pieces_of,
    truncated,
)
from torchmuster.train.data.rows import Layout, Row, collate_rows, lay_out, row_of
from torchmuster.train.data.tokenizers import Tokenizer, tokenizer_digest
from torchmuster.train.losses import IGNORED
from torchmuster.train.seeds import derive_seed
from torchmuster.units import plural

logger = logging.getLogger(__name__)

INSTALL = "pip install 'torchmuster[datasets]'"
BUILDERS = {
    "jsonl": "json",
    "ndjson": "json",
    "json": "json",
    "csv": "csv",
    "parquet": "parquet",
    "txt": "text",
}
LINE_FILES = (".jsonl", ".ndjson", ".txt")  # one record per line
COMPRESSIONS = ("gz", "bz2", "xz", "zst")
RECORDS_AT_ONCE = 1000  # tokenized, packed and shuffled together
RECORDS_OF_SAMPLE = 100  # read to find one that counts in the loss
# A position in a stream: the number of a block of records, the data set's state before it, and how
# many of its rows were used.
BEGINNING = {"block": 0, "before": None, "used": 0}
SHOWN = 5  # bad records named in an error
REPORT_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How records become rows: format, tokenizer, length, packed or padded."""

    tokenizer: Tokenizer
    sequence_length: int
    pack: bool = True
    record: RecordFormat = field(default_factory=RecordFormat)

    @property
    def is_whole(self) -> bool:
        """Whether a record is truncated to one row, instead of continuing in the next."""
        return self.record.kind in WHOLE


@dataclass(frozen=True, kw_only=True)
class Records:
    """A data set of ``datasets`` and where its records come from."""

    dataset: Any
    name: str
    files: tuple[str, ...] = ()  # local ones

    @property
    def is_stream(self) -> bool:
        """Whether the data set can only be read in sequence."""
        return not hasattr(self.dataset, "__len__")

    def place(self, number: int) -> str:
        """Return the file and line of a record, counted from 0; else its number, counted from 1."""
        for path in self.files:
            if not path.endswith(LINE_FILES):
                break
            with Path(path).open("rb") as lines:
                for line_number, line in enumerate(lines, start=1):
                    if not line.strip() and not path.endswith(".txt"):
                        continue  # a JSON lines file may have blank lines
                    if number == 0:
                        return f"{path}:{line_number}"
                    number -= 1
        return f"{self.name}, record {number + 1}"


class TextRows(torch.utils.data.Dataset[Row]):
    """Rows of tokens in a memory-mapped file, for ``BatchLoader``."""

    def __init__(self, rows: Any, text: TextFormat) -> None:
        self._rows = rows
        self._text = text
        self.collate = None if text.pack else collate_rows

    def identity(self) -> str:
        """Return the hash of the content."""
        return hashlib.blake2b(self._column("digest").tobytes(), digest_size=12).hexdigest()

    def describe(self, records: int) -> list[str]:
        """Return lines on what became of so many records."""
        from pyarrow import compute

        lengths = compute.list_value_length(self._rows.data.column("input_ids")).to_numpy()
        begins = compute.list_value_length(self._rows.data.column("begins")).to_numpy()
        tokens = int(lengths.sum())
        room = len(self) * self._text.sequence_length if self._text.pack else tokens
        share = 100 * int(self._column("counted").sum()) / tokens
        lines = [
            f"{plural(records, 'record')}: {tokens:,} tokens, {share:.0f} % of them count in the "
            f"loss; {plural(len(self), 'row')}, {100 * tokens / room:.0f} % full"
        ]
        if not self._text.is_whole:
            return lines
        shortened = int(self._column("truncated").sum())
        if shortened:
            lines.append(
                f"{shortened:,} of them are longer than data.sequence_length and were truncated"
            )
        left_out = records - int(begins.sum())
        if left_out:
            lines.append(
                f"{plural(left_out, 'record')} left out: none of their tokens counts in the loss"
            )
        return lines

    def _column(self, name: str) -> Any:
        return self._rows.data.column(name).to_numpy()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._row(self._rows[index])

    def __getitems__(self, indices: list[int]) -> list[Row]:
        """Return several rows, which are read at once."""
        columns = self._rows[indices]
        rows = []
        for number in range(len(indices)):
            rows.append(self._row({name: values[number] for name, values in columns.items()}))
        return rows

    def _row(self, columns: dict[str, Any]) -> Row:
        layout = Layout(columns["input_ids"], columns["labels"], columns["begins"])
        return row_of(layout, self._text.sequence_length, masked=not self._text.pack)


def import_datasets(purpose: str) -> Any:
    """Return the package ``datasets``, without its progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise Impossible(
            f"{purpose} the package datasets, which is not installed", why=str(error), fix=INSTALL
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def open_files(
    places: str | Sequence[str],
    record: RecordFormat,
    *,
    options: Mapping[str, Any] | None = None,
) -> Records:
    """Open files of one kind: paths, patterns or URLs; ``options`` are those of ``load_dataset``."""
    patterns = [places] if isinstance(places, str) else list(places)
    datasets = import_datasets(f"data files ({patterns[0]}) need")
    files: list[str] = []
    for pattern in patterns:
        files += matching_files(pattern)
    builders = {_builder(file) for file in files}
    if len(builders) > 1:
        raise Impossible(
            f"data.files has files of different kinds: {', '.join(sorted(builders))}",
            fix="give files of one kind, or convert them",
        )
    (builder,) = builders
    local = tuple(file for file in files if "://" not in file)
    options = {"split": "train", **(options or {})}
    if builder == "csv":
        # A CSV file has text only: neither "NA" nor 007 means anything else.
        names = (record.text_field, record.prompt_field, record.completion_field)
        options["converters"] = {**dict.fromkeys(names, str), **options.get("converters", {})}
        options.setdefault("keep_default_na", False)
    try:
        dataset = datasets.load_dataset(builder, data_files=files, **options)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(files, local, builder, error) from error
    if builder == "text" and record.text_field != "text":
        dataset = dataset.rename_column("text", record.text_field)
    return Records(dataset=dataset, name=", ".join(patterns), files=local)


def _builder(file: str) -> str:
    suffixes = [suffix.lower() for suffix in Path(file).name.split(".")[1:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if builder is None:
        raise Impossible(
            f"{file} is of an unknown kind",
            why=f"the kinds are {', '.join(BUILDERS)}, which may be compressed",
            fix="rename or convert the file",
        )
    return builder


def _unreadable(
    files: Sequence[str], local: Sequence[str], builder: str, error: Exception
) -> Impossible:
    """Return the error with the lines that cannot be read, as far as they can be found."""
    problems: list[str] = []
    for file in local:
        if not Path(file).stat().st_size:
            problems.append(f"{file}: it is empty")
        elif file.endswith(LINE_FILES):
            problems += bad_lines(Path(file), is_json=builder == "json")
    fix = "fix or remove these lines"
    if not problems:
        problems = [first_line(error.__cause__ or error)]
        fix = "check that the files are whole, and that their names end as their content requires"
    return Impossible(
        f"cannot read {', '.join(files[:3])}", why="\n".join(problems[:SHOWN]), fix=fix
    )


def bad_lines(path: Path, *, is_json: bool) -> list[str]:
    """Return the places of lines that are no UTF-8, or no JSON objects."""
    problems = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode()
                value = json.loads(text) if is_json and text.strip() else {}
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}:{number}: {error}")
                continue
            if not isinstance(value, dict):
                kind = type(value).__name__
                problems.append(f"{path}:{number}: a {kind}, not an object with fields")
    return problems


def open_dataset(name_or_path: str, options: Mapping[str, Any] | None = None) -> Records:
    """Open a data set: a folder that ``save_to_disk`` wrote, a folder of files, or a name on the hub.

    ``options`` are those of ``datasets.load_dataset``; the split is ``train`` if they have none.
    """
    options = {"split": "train", **(options or {})}
    split = options["split"]
    datasets = import_datasets("datasets by name or folder need")
    folder = Path(name_or_path).expanduser()
    name = f"{name_or_path} {split}"
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            dataset = datasets.load_from_disk(str(folder))
            if isinstance(dataset, dict):
                dataset = dataset[split]
            if options.get("streaming"):
                dataset = dataset.to_iterable_dataset()
            return Records(dataset=dataset, name=name)
        source = str(folder) if folder.is_dir() else name_or_path
        dataset = datasets.load_dataset(source, **options)
        return Records(dataset=dataset, name=name)
    except (OSError, ValueError, KeyError) as error:
        raise Impossible(
            f"cannot open the dataset {name_or_path!r}, split {split!r}",
            why=first_line(error),
            fix="set the path of a folder, or the name of a dataset on the hub; without network "
            "access, download it "
            f"on another host: hf download --repo-type dataset {name_or_path} --local-dir FOLDER",
        ) from error


def rows_of(records: Records, text: TextFormat) -> TextRows:
    """Tokenize and lay out all records, or open the result of an earlier call.

    Unusable records are named with their files and lines.
    """
    datasets = import_datasets("text needs")
    path = _cache_path(records, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset = records.dataset.with_format(None)
    integers = datasets.List(datasets.Value("int32"))
    number = datasets.Value("int64")
    rows: Any = ()
    try:
        if len(dataset):  # map does not call the function without records
            rows = dataset.map(
                _Preparation(records, text),
                batched=True,
                batch_size=RECORDS_AT_ONCE,
                with_indices=True,
                remove_columns=dataset.column_names,
                features=datasets.Features(
                    input_ids=integers,
                    labels=integers,
                    begins=integers,
                    counted=number,
                    truncated=number,
                    digest=number,
                ),
                cache_file_name=str(path),
                load_from_cache_file=True,
                new_fingerprint=path.stem,
            )
    except OSError as error:
        raise MusterError(
            f"cannot write the prepared data to {path}",
            why=error.strerror or str(error),
            fix="free disk space there, or set HF_DATASETS_CACHE to a folder on another disk",
        ) from error
    if not len(rows):
        raise Impossible(
            "there is nothing to train on",
            why=f"none of {plural(len(dataset), 'record')} has a token that counts in the loss",
            fix="check the data: each conversation needs an answer within data.sequence_length",
        )
    return TextRows(rows, text)


def _cache_path(records: Records, text: TextFormat) -> Path:
    """Return the path of the rows, by everything that their content depends on."""
    import datasets

    from torchmuster import __version__

    parts = [
        __version__,
        datasets.__version__,
        records.dataset._fingerprint,
        asdict(text.record),
        text.sequence_length,
        text.pack,
        tokenizer_digest(text.tokenizer),
    ]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
    return Path(datasets.config.HF_DATASETS_CACHE) / "torchmuster" / f"{digest}.arrow"


class _Preparation:
    """The function that ``map`` calls with 1,000 records at a time; it returns their rows."""

    def __init__(self, records: Records, text: TextFormat) -> None:
        self._records = records
        self._text = text
        self._convert = RecordTokenizer(text.record, text.tokenizer)
        self._reported_s = time.monotonic()

    def __call__(self, columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        names = list(columns)
        batch = [
            dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        documents = usable_documents(self._records, self._convert, batch, first=indices[0])
        shortened = [shortened_document(document, self._text) for document in documents]
        cut = [
            short
            for short, document in zip(shortened, documents, strict=True)
            if 0 < len(short.ids) < len(document.ids)
        ]
        rows = lay_out(
            shortened, self._text.sequence_length, pack=self._text.pack, whole=self._text.is_whole
        )
        if time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            logger.info("tokenizing: %s records", f"{indices[-1] + 1:,}")
        return {
            "input_ids": [row.ids for row in rows],
            "labels": [row.labels for row in rows],
            "begins": [row.begins for row in rows],
            "counted": [len(row.labels) - row.labels.count(IGNORED) for row in rows],
            # The first row of the batch has the number of all its documents that were cut.
            "truncated": [len(cut), *[0] * len(rows)][: len(rows)],
            "digest": [_digest(row) for row in rows],
        }


def _digest(row: Layout) -> int:
    """Return a hash of a row's tokens and labels, which fits into a column of integers."""
    content = repr((row.ids, row.labels)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def usable_documents(
    records: Records, convert: RecordTokenizer, batch: Sequence[Any], *, first: int
) -> list[Tokens]:
    """Return the documents of some records; raise an error with the places of unusable ones.

    ``first`` is the number of the first record, counted from 0.
    """
    documents: list[Tokens] = []
    problems: list[str] = []
    fixes: list[str] = []
    for number, document in enumerate(convert.documents(batch), start=first):
        if isinstance(document, Tokens):
            documents.append(document)
            continue
        fixes.append(document.fix)
        if len(problems) < SHOWN:
            parts = [records.place(number), document.what, document.why]
            problems.append(": ".join(part for part in parts if part))
    if fixes:
        if len(fixes) > SHOWN:
            problems.append(f"and {len(fixes) - SHOWN:,} more")
        total = plural(first + len(batch), "record")
        raise Impossible(
            f"{len(fixes):,} of the first {total} cannot be used",
            why="\n".join(problems),
            fix=fixes[0] or "fix or remove these records",
        )
    return documents


def shortened_document(document: Tokens, text: TextFormat) -> Tokens:
    """Return a document that must fit into one row as far as it does; others stay as they are."""
    return truncated(document, text.sequence_length) if text.is_whole else document


def sample_of(records: Records, text: TextFormat) -> list[tuple[str, bool]]:
    """Check the first 100 records; return the first one that counts in the loss: see :func:`pieces_of`."""
    head = list(islice(records.dataset, RECORDS_OF_SAMPLE))
    convert = RecordTokenizer(text.record, text.tokenizer)
    for document in usable_documents(records, convert, head, first=0):
        short = truncated(document, text.sequence_length)
        if short.ids:
            return pieces_of(short, text.tokenizer)
    return []


class TextStream(torch.utils.data.IterableDataset[Row]):
    """Rows of a streamed data set, 1,000 records at a time; it resumes by the data set's own state.

    With a ``seed``, the rows of each 1,000 records are shuffled.
    """

    def __init__(self, records: Records, text: TextFormat, *, seed: int | None = None) -> None:
        self._records = records
        self._text = text
        self._seed = seed
        self._epoch = 0
        self._convert = RecordTokenizer(text.record, text.tokenizer)
        self.collate = None if text.pack else collate_rows
        self._position: dict[str, Any] = dict(BEGINNING)

    def share(self, rank: int, ranks: int) -> "TextStream":
        """Return what one of several ranks reads."""
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(self._records.dataset, rank, ranks)
        return TextStream(replace(self._records, dataset=part), self._text, seed=self._seed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch
        self._records.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last row."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._position = state

    def __iter__(self) -> Iterator[Row]:
        text, dataset = self._text, self._records.dataset
        number, before, used = (self._position[name] for name in ("block", "before", "used"))
        if before is not None:
            dataset.load_state_dict(before)
        records = iter(dataset)
        while True:
            block = list(islice(records, RECORDS_AT_ONCE))
            if not block:
                break
            documents = [self._document(record) for record in block]
            rows = lay_out(documents, text.sequence_length, pack=text.pack, whole=text.is_whole)
            if self._seed is not None:
                order = derive_seed(self._seed, "block", self._epoch, number)
                random.Random(order).shuffle(rows)
            for row in rows[used:]:
                used += 1
                self._position = {"block": number, "before": before, "used": used}
                yield row_of(row, text.sequence_length, masked=not text.pack)
            number, before, used = number + 1, dataset.state_dict(), 0
        self._position = dict(BEGINNING)

    def _document(self, record: Any) -> Tokens:
        (document,) = self._convert.documents([record])
        if isinstance(document, MusterError):
            raise MusterError(
                f"a record of {self._records.name} cannot be used: {document.what}",
                why=f"{document.why}; the record is {record!r:.200}",
                fix=document.fix,
            )
        return shortened_document(document, self._text)
