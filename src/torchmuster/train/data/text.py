"""Text as rows of tokens for a language model. Hugging Face ``datasets`` reads, maps and caches it."""

import csv
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.formats import (
    WHOLE,
    RecordFormat,
    RecordTokenizer,
    Tokenizer,
    Tokens,
    pieces_of,
    truncated,
)
from torchmuster.train.data.rows import Layout, Row, collate_rows, lay_out, row_of
from torchmuster.train.data.tokenizers import tokenizer_digest
from torchmuster.train.losses import IGNORED
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
COMPRESSIONS = ("gz", "bz2", "xz", "zst")
RECORDS_AT_ONCE = 1000  # tokenized and packed together
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
        """Return the file and line of a record, counted from 0."""
        for path in self.files:
            for line in record_lines(Path(path)):
                if number == 0:
                    return f"{path}:{line}"
                number -= 1
        return f"{self.name} [{number}]"


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What became of the records; ``digest`` is the hash of all tokens and labels."""

    records: int
    left_out: int  # without a token that counts in the loss
    truncated: int
    lost_tokens: int  # of truncated records
    tokens: int
    trained_tokens: int
    rows: int
    row_tokens: int  # tokens of all rows, with padding
    digest: str
    sample: list[tuple[str, bool]]  # the first record: see pieces_of

    def lines(self) -> list[str]:
        """Describe the data."""
        share = 100 * self.trained_tokens / max(self.tokens, 1)
        full = 100 * self.tokens / max(self.row_tokens, 1)
        lines = [
            f"{plural(self.records, 'record')}: {self.tokens:,} tokens, {share:.0f} % of them count "
            f"in the loss; {plural(self.rows, 'row')}, {full:.0f} % full"
        ]
        if self.truncated:
            lines.append(
                f"{self.truncated:,} of them are longer than data.sequence_length and were "
                f"truncated: {self.lost_tokens:,} tokens are not used"
            )
        if self.left_out:
            lines.append(
                f"{plural(self.left_out, 'record')} left out: none of their tokens counts in the loss"
            )
        return lines


class TextRows(torch.utils.data.Dataset[Row]):
    """Rows of tokens in a memory-mapped file, for ``BatchLoader``."""

    def __init__(self, rows: Any, facts: TextFacts, text: TextFormat) -> None:
        self._rows = rows
        self.facts = facts
        self._length = text.sequence_length
        self._pack = text.pack
        self.collate = None if text.pack else collate_rows

    def identity(self) -> str:
        """Return the hash of the content."""
        return self.facts.digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._row(self._rows[index])

    def __getitems__(self, indices: list[int]) -> list[Row]:
        """Return several rows, which are read at once."""
        columns = self._rows[indices]
        return [
            self._row({name: values[number] for name, values in columns.items()})
            for number in range(len(indices))
        ]

    def _row(self, columns: dict[str, Any]) -> Row:
        layout = Layout(columns["input_ids"], columns["labels"], columns["begins"])
        return row_of(layout, self._length, masked=not self._pack)


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
        files += _matching(pattern)
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
        options["converters"] = dict.fromkeys(names, str)
        options["keep_default_na"] = False
    try:
        dataset = datasets.load_dataset(builder, data_files=files, **options)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(files, local, builder, error) from error
    if builder == "text" and record.text_field != "text":
        dataset = dataset.rename_column("text", record.text_field)
    return Records(dataset=dataset, name=", ".join(patterns), files=local)


def _matching(pattern: str) -> list[str]:
    if "://" in pattern:
        return [pattern]
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    elif path.is_file():
        files = [path]
    else:
        anchor = Path(path.anchor)
        relative = path.relative_to(anchor) if path.is_absolute() else path
        files = sorted(file for file in anchor.glob(str(relative)) if file.is_file())
    if not files:
        raise Impossible(
            f"no files at {pattern}",
            why=f"searched from {Path.cwd()}, on this host",
            fix="check the path; a relative one is relative to the working directory",
        )
    return [str(file) for file in files]


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
    empty = [file for file in local if not Path(file).stat().st_size]
    problems = [f"{file}: it is empty" for file in empty]
    if builder in ("json", "text"):
        for file in local:
            problems += bad_lines(Path(file), is_json=builder == "json")
    cause = error.__cause__ or error
    text = (str(cause).splitlines() or [type(cause).__name__])[0]
    return Impossible(
        f"cannot read {', '.join(files[:3])}",
        why="\n".join(problems[:SHOWN]) or text,
        fix="fix or remove these lines",
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


def record_lines(path: Path) -> Iterator[int]:
    """Yield the line where each record of a local file begins; rows of other files are counted."""
    suffix = path.suffix.removeprefix(".")
    if suffix == "csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            next(rows, None)
            begin = rows.line_num + 1
            for _ in rows:
                yield begin
                begin = rows.line_num + 1
    elif BUILDERS.get(suffix) in ("json", "text"):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() or suffix == "txt":
                    yield number
    else:
        datasets = import_datasets(f"{path} needs")
        loaded = datasets.load_dataset(_builder(str(path)), data_files=[str(path)], split="train")
        yield from range(1, len(loaded) + 1)


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
                dataset = _split_of(dataset, name_or_path, split)
            if options.get("streaming"):
                dataset = dataset.to_iterable_dataset()
            return Records(dataset=dataset, name=name)
        source = str(folder) if folder.is_dir() else name_or_path
        dataset = datasets.load_dataset(source, **options)
        return Records(dataset=dataset, name=name)
    except (OSError, ValueError) as error:
        raise Impossible(
            f"cannot open the dataset {name_or_path!r}, split {split!r}",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="set the path of a folder, or the name of a dataset on the hub; without network "
            "access, download it "
            f"on another host: hf download --repo-type dataset {name_or_path} --local-dir FOLDER",
        ) from error


def _split_of(splits: dict[str, Any], name: str, split: str) -> Any:
    if split not in splits:
        raise Impossible(
            f"the dataset {name!r} has no split {split!r}",
            why=f"it has {', '.join(splits)}",
            fix=f"set one of them: data.options: {{split: {next(iter(splits))}}}",
        )
    return splits[split]


def rows_of(records: Records, text: TextFormat) -> TextRows:
    """Tokenize and lay out all records, or open the result of an earlier call.

    Unusable records are named with their files and lines.
    """
    datasets = import_datasets("text needs")
    path = _cache_path(records, text)
    facts_path = path.with_suffix(".json")
    if path.is_file() and facts_path.is_file():
        rows = datasets.Dataset.from_file(str(path))
        return TextRows(rows, _read_facts(facts_path), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    preparation = _Preparation(records, text)
    dataset = records.dataset.with_format(None)
    integers = datasets.List(datasets.Value("int32"))
    try:
        rows = dataset.map(
            preparation,
            batched=True,
            batch_size=RECORDS_AT_ONCE,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=datasets.Features(input_ids=integers, labels=integers, begins=integers),
            cache_file_name=str(path),
            load_from_cache_file=False,
            new_fingerprint=path.stem,
        )
    except OSError as error:
        raise MusterError(
            f"cannot write the prepared data to {path}",
            why=error.strerror or str(error),
            fix="free disk space there, or set HF_DATASETS_CACHE to a folder on another disk",
        ) from error
    facts = preparation.facts()
    facts_path.write_text(json.dumps(asdict(facts)))
    return TextRows(rows, facts, text)


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


def _read_facts(path: Path) -> TextFacts:
    values = json.loads(path.read_text())
    sample = [(str(text), bool(counted)) for text, counted in values["sample"]]
    return TextFacts(**{**values, "sample": sample})


class _Preparation:
    """The function that ``map`` calls with some records at a time; it sums up what became of them."""

    def __init__(self, records: Records, text: TextFormat) -> None:
        self._records = records
        self._text = text
        self._convert = RecordTokenizer(text.record, text.tokenizer)
        self._total = len(records.dataset)
        self._wrong: list[tuple[int, MusterError]] = []
        self._counts = dict.fromkeys(
            (
                *("records", "left_out", "truncated", "lost_tokens", "tokens"),
                *("trained_tokens", "rows", "row_tokens"),
            ),
            0,
        )
        self._sample: list[tuple[str, bool]] = []
        self._hash = hashlib.blake2b(digest_size=12)
        self._reported_s = time.monotonic()

    def __call__(self, columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        names = list(columns)
        records = [
            dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        documents = self._documents(records, indices)
        length = self._text.sequence_length
        rows = lay_out(documents, length, pack=self._text.pack, whole=self._text.is_whole)
        self._count(rows)
        if indices[-1] == self._total - 1:
            self._check()
        return {
            "input_ids": [row.ids for row in rows],
            "labels": [row.labels for row in rows],
            "begins": [row.begins for row in rows],
        }

    def _documents(self, records: list[dict[str, Any]], indices: list[int]) -> list[Tokens]:
        documents = []
        counts = self._counts
        counts["records"] += len(records)
        for number, document in zip(indices, self._convert.documents(records), strict=True):
            if isinstance(document, MusterError):
                self._wrong.append((number, document))
                continue
            short = self._shortened(document)
            if not short.ids:
                counts["left_out"] += 1
                continue
            if not self._sample:
                first = truncated(short, self._text.sequence_length)
                self._sample = pieces_of(first, self._text.tokenizer)
            documents.append(short)
        return documents

    def _shortened(self, document: Tokens) -> Tokens:
        if not self._text.is_whole:
            return document
        short = truncated(document, self._text.sequence_length)
        lost = len(document.ids) - len(short.ids)
        if short.ids and lost:
            self._counts["truncated"] += 1
            self._counts["lost_tokens"] += lost
        return short

    def _count(self, rows: list[Layout]) -> None:
        counts = self._counts
        for row in rows:
            counts["tokens"] += len(row.ids)
            counts["trained_tokens"] += len(row.labels) - row.labels.count(IGNORED)
            counts["row_tokens"] += self._text.sequence_length if self._text.pack else len(row.ids)
            self._hash.update(repr((row.ids, row.labels)).encode())
        counts["rows"] += len(rows)
        if time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            logger.info(
                "tokenizing: %s records, %s tokens",
                f"{counts['records']:,}",
                f"{counts['tokens']:,}",
            )

    def _check(self) -> None:
        """Raise after the last record, so that no incomplete result is cached."""
        refuse_records(self._records, self._wrong, self._total)
        if not self._counts["rows"]:
            raise Impossible(
                "there is nothing to train on",
                why=f"none of {plural(self._total, 'record')} has a token that counts in the loss",
                fix="check the data: each conversation needs an answer within data.sequence_length",
            )

    def facts(self) -> TextFacts:
        """Return the sums."""
        return TextFacts(**self._counts, digest=self._hash.hexdigest(), sample=self._sample)


def refuse_records(records: Records, wrong: Sequence[tuple[int, MusterError]], total: int) -> None:
    """Raise an error with the places of unusable records, if there are any."""
    if not wrong:
        return
    lines = []
    for number, error in wrong[:SHOWN]:
        parts = [records.place(number), error.what, error.why]
        lines.append(": ".join(part for part in parts if part))
    if len(wrong) > SHOWN:
        lines.append(f"and {len(wrong) - SHOWN:,} more")
    raise Impossible(
        f"{len(wrong):,} of {plural(total, 'record')} cannot be used",
        why="\n".join(lines),
        fix=wrong[0][1].fix or "fix or remove these records",
    )


class TextStream(torch.utils.data.IterableDataset[Row]):
    """Rows of a streamed data set, 1,000 records at a time; it resumes by the data set's own state."""

    def __init__(self, records: Records, text: TextFormat) -> None:
        self._records = records
        self._text = text
        self._convert = RecordTokenizer(text.record, text.tokenizer)
        self.collate = None if text.pack else collate_rows
        # The data set's state before a block of records, and the rows of it that were used.
        self._position: dict[str, Any] = {"dataset": None, "used": 0}
        self._begin = self._position

    def share(self, rank: int, ranks: int) -> "TextStream":
        """Return what one of several ranks reads."""
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(self._records.dataset, rank, ranks)
        return TextStream(replace(self._records, dataset=part), self._text)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._records.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last row."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._position = self._begin = state

    def __iter__(self) -> Iterator[Row]:
        text, dataset = self._text, self._records.dataset
        before, used = self._begin["dataset"], self._begin["used"]
        self._begin = {"dataset": None, "used": 0}  # for the next iteration
        if before is not None:
            dataset.load_state_dict(before)
        records = iter(dataset)
        while True:
            block = list(islice(records, RECORDS_AT_ONCE))
            if not block:
                break
            documents = [self._document(record) for record in block]
            rows = lay_out(documents, text.sequence_length, pack=text.pack, whole=text.is_whole)
            for number in range(used, len(rows)):
                self._position = {"dataset": before, "used": number + 1}
                yield row_of(rows[number], text.sequence_length, masked=not text.pack)
            before, used = dataset.state_dict(), 0
        self._position = {"dataset": before, "used": 0}

    def _document(self, record: Any) -> Tokens:
        (document,) = self._convert.documents([record])
        if isinstance(document, MusterError):
            raise MusterError(
                f"a record of {self._records.name} cannot be used: {document.what}",
                why=f"{document.why}; the record is {record!r:.200}",
                fix=document.fix,
            )
        return truncated(document, self._text.sequence_length) if self._text.is_whole else document
