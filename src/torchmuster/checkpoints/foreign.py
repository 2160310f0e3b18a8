"""Find out whether a checkpoint that a script wrote is complete, by looking at its files.

A cut is visible in a file of ``torch.save``, which ends with a zip directory, and in one of safetensors, which begins
with its size. Libraries write many files, so a save that was interrupted is visible by the file that each of them
writes last: DCP (``torch.distributed.checkpoint``) syncs its shards before it renames ``.metadata``.
Nothing is ever unpickled; tensors are not read, so a checkpoint of any size is checked in milliseconds.
"""

import enum
import itertools
import zipfile
from dataclasses import dataclass
from pathlib import Path

from torchmuster import untrusted

_ZIP_BEGIN = b"PK\x03\x04"
_TORCH_SUFFIXES = {".pt", ".pth", ".ckpt", ".bin", ".pkl"}
# More takes too much memory and time; the folder's name is from the run's records, and may be that of any folder.
_MOST_JSON_BYTES = 32 * 2**20
_MOST_FILES = 50_000
# Hugging Face's Trainer puts it into a folder that it is still writing after SIGTERM.
_UNFINISHED = "checkpoint-is-incomplete.txt"
_METADATA = ".metadata"
_WRITTEN_LAST = {
    "transformers": "trainer_state.json",
    "accelerate": "random_states_0.pkl",
    "deepspeed": "*model_states.pt",
    "DCP": _METADATA,
}


class Completeness(enum.StrEnum):
    """Whether a checkpoint can be loaded, as far as its files show."""

    COMPLETE = "complete"
    TORN = "torn"
    MISSING = "missing"
    UNKNOWN = "not checked"


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The condition of a checkpoint; ``why`` is "" for a complete one."""

    state: Completeness
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else str(self.state)


def condition_of(path: str, library: str) -> Condition:
    """Return the condition of a checkpoint that ``library`` wrote, such as transformers, deepspeed or DCP."""
    if "://" in path:
        return Condition(state=Completeness.UNKNOWN, why="it is in object storage")
    location = Path(path)
    try:
        if location.is_dir():
            problem = _folder_problem(location, library)
        elif location.is_file():
            problem = file_problem(location)
        else:
            why = "it was deleted, or this host cannot access it"
            return Condition(state=Completeness.MISSING, why=why)
    except OSError as error:  # also if it is deleted at this moment
        return Condition(state=Completeness.UNKNOWN, why=error.strerror or str(error))
    except untrusted.Unreadable as error:
        return Condition(state=Completeness.UNKNOWN, why=str(error))
    if problem is None:
        return Condition(state=Completeness.COMPLETE)
    return Condition(state=Completeness.TORN, why=problem)


def file_problem(path: Path) -> str | None:
    """Return why a file is incomplete, such as ``model.pt is truncated: …``; None if it seems whole."""
    size = path.stat().st_size
    if size == 0:
        return f"{path.name} is empty"
    problem = None
    if path.suffix == ".safetensors":
        problem = _safetensors_problem(path, size)
    elif path.name == "trainer_state.json" or path.name.endswith(".index.json"):
        try:
            untrusted.parse_json(untrusted.read_bounded(path, _MOST_JSON_BYTES))
        except untrusted.Unreadable:
            problem = "is truncated"
    elif path.suffix in _TORCH_SUFFIXES:
        problem = _torch_problem(path, size)
    return None if problem is None else f"{path.name} {problem}"


def _torch_problem(path: Path, size: int) -> str | None:
    """Compare a torch.save file with the zip directory at its end."""
    with path.open("rb") as stream:
        begin = stream.read(16)
    if not any(begin):
        return "begins with zeros: the write did not finish"
    if not begin.startswith(_ZIP_BEGIN):
        return None  # the format before torch 1.6, or another program's file
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception:  # BadZipFile, and others for damaged numbers
        return f"is truncated: {size:,} bytes, without the zip directory at the end"
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        return "was not written by torch.save: it contains no data.pkl"
    return None


def _safetensors_problem(path: Path, size: int) -> str | None:
    """Compare a safetensors file with its header, which is at its beginning."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MOST_JSON_BYTES:
            return "does not begin with the header of a safetensors file"
        text = stream.read(min(length, size))
    if len(text) < length:
        return f"is truncated: its header alone is longer than its {size:,} bytes"
    try:
        header = untrusted.parse_json(text)
        ends = [int(header[name]["data_offsets"][1]) for name in header if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return "has an invalid header"
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        return f"is truncated: {size:,} of {needed:,} bytes"
    return None


def _folder_problem(folder: Path, library: str) -> str | None:
    """Return what is missing or cut in a folder; None if it seems whole."""
    inside = [*itertools.islice(folder.rglob("*"), _MOST_FILES + 1)]
    if len(inside) > _MOST_FILES:
        raise untrusted.Unreadable(f"it contains more than {_MOST_FILES:,} files")
    files = [path for path in sorted(inside) if path.is_file()]
    if not files:
        return "the folder is empty"
    if (folder / _UNFINISHED).exists():
        return f"{_UNFINISHED} exists: the save did not finish"
    last = {path.parent: f"*{_METADATA}" for path in files if path.suffix == ".distcp"}
    is_in_safetensors = library == "DCP" and any(folder.glob("*.safetensors"))
    if library in _WRITTEN_LAST and not is_in_safetensors:
        last.setdefault(folder, _WRITTEN_LAST[library])
    for parent, pattern in last.items():
        if not any(path.is_file() for path in parent.glob(pattern)):
            return (
                f"{pattern.lstrip('*')} is missing: it is written last, so the save did not finish"
            )
    return next(filter(None, map(file_problem, files)), None)
