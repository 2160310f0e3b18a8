"""Finding files, on this machine or in object storage, through fsspec."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.utils import infer_compression

from torchmuster.errors import Impossible
from torchmuster.redaction import redact_text

RECORDS = (".txt", ".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that was found."""

    place: str  # with its protocol, as it can be opened
    size_bytes: int

    @property
    def shown(self) -> str:
        """The place as it may be shown: an address can hold a password."""
        return redact_text(self.place.removeprefix("file://"))

    @property
    def compression(self) -> str | None:
        """How it is compressed, by its name; None where it is not."""
        return infer_compression(self.place)  # type: ignore[no-any-return]

    @property
    def is_text(self) -> bool:
        """Whether each line is a sample as it stands, and not JSON."""
        return _suffix(self.place) == ".txt"


def _suffix(place: str) -> str:
    name = place.rsplit("/", 1)[-1].lower()
    if infer_compression(name) is not None:
        name = name.rsplit(".", 1)[0]
    return f".{name.rsplit('.', 1)[-1]}" if "." in name else ""


def find_files(places: str | Sequence[str], options: Mapping[str, Any]) -> list[File]:
    """Return the files at these paths, patterns, folders or addresses, sorted, each one once."""
    wanted = [places] if isinstance(places, str) else list(places)
    found: dict[str, File] = {}
    for place in wanted:
        some = _found_at(place, options)
        if not some:
            raise _nothing_at(place)
        found.update((one.place, one) for one in some)
    files = [found[place] for place in sorted(found)]
    strange = [one.shown for one in files if _suffix(one.place) not in RECORDS]
    if strange:
        raise Impossible(
            f"{strange[0]}: this kind of file cannot be read as samples",
            why=f"samples are lines of {', '.join(RECORDS)}, also compressed (.gz, .bz2, .xz, .zst)",
            fix="name the files more closely, such as data/*.jsonl; or write a dataset of your own",
        )
    for one in files:
        if one.compression == "zstd" and not _can_read_zstd():
            raise Impossible(
                f"{one.shown}: a file compressed with zstd cannot be read here",
                why="the package zstandard is not installed",
                fix="pip install zstandard",
            )
    return files


def _can_read_zstd() -> bool:
    from fsspec.compression import compr

    return "zstd" in compr


def _found_at(place: str, options: Mapping[str, Any]) -> list[File]:
    try:
        storage, path = fsspec.core.url_to_fs(place, **options)
    except (ImportError, ValueError) as error:
        raise _unknown_storage(place, error) from None
    try:
        if any(sign in path for sign in "*?["):
            paths = storage.glob(path)
        elif storage.isdir(path):
            paths = [one for one in storage.find(path) if _suffix(one) in RECORDS]
        else:
            paths = [path] if storage.exists(path) else []
        infos = [storage.info(one) for one in paths]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Impossible(
            f"{redact_text(place)} cannot be listed",
            why=redact_text(f"{type(error).__name__}: {error}"),
            fix="check the address, and that this machine may read it",
        ) from None
    return [
        File(place=storage.unstrip_protocol(one["name"]), size_bytes=int(one["size"] or 0))
        for one in infos
        if one["type"] == "file"
    ]


def _unknown_storage(place: str, error: Exception) -> Impossible:
    protocol = place.split("://", 1)[0]
    fix = "pip install 'torchmuster[s3]'" if protocol in ("s3", "s3a") else ""
    return Impossible(
        f"files at {protocol}:// cannot be read here",
        why=redact_text(str(error)),
        fix=fix or "install the package that fsspec names for it",
    )


def _nothing_at(place: str) -> Impossible:
    return Impossible(
        f"there are no files at {redact_text(place)}",
        why=f"looked for samples as lines of {', '.join(RECORDS)}, also compressed",
        fix="check the path; a pattern such as data/*.jsonl is written in quotes",
    )


def digest(files: Sequence[File]) -> str:
    """Return a few letters that are others if a file is added, removed or of another size."""
    names = "\n".join(f"{one.size_bytes} {one.place}" for one in files)
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
