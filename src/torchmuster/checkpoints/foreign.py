"""Find out whether a checkpoint that a script wrote is complete, by looking at its files.

Knows the files of ``torch.save``, Hugging Face's Trainer, Lightning, Accelerate, DeepSpeed and ``torch.distributed.checkpoint`` (DCP).
Nothing is ever unpickled; tensors are not read, so a checkpoint of any size is checked in milliseconds.
"""

import contextlib
import enum
import itertools
import pickletools
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster import untrusted

_ZIP_BEGIN = b"PK\x03\x04"
_TORCH_SUFFIXES = {".pt", ".pth", ".ckpt", ".bin", ".pkl"}
# The limit of the safetensors package.
_MOST_HEAD_BYTES = 100_000_000
# More takes too much memory and time; the folder's name is from the run's records, and may be that of any folder.
_MOST_JSON_BYTES = 32 * 2**20
_MOST_FILES = 50_000
# DCP's description of a larger checkpoint takes too long to read; then only its end is checked.
_MOST_METADATA_BYTES = 16 * 2**20
_METADATA = ".metadata"
_STATE = "trainer_state.json"
_WEIGHTS = re.compile(r".+\.safetensors|(?:pytorch|adapter)_model.*\.bin")
# Hugging Face's Trainer puts it into a folder that it is still writing after SIGTERM.
_UNFINISHED = "checkpoint-is-incomplete.txt"
_WRITTEN_LAST = ": it is written last, so the save did not finish"


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
    place = Path(path)
    try:
        if place.is_dir():
            problem = _folder_problem(place, library)
        elif place.is_file():
            problem = file_problem(place)
        else:
            why = "it was deleted, or this host cannot access it"
            return Condition(state=Completeness.MISSING, why=why)
    except OSError as error:  # also if it is deleted at this moment
        return Condition(state=Completeness.UNKNOWN, why=error.strerror or str(error))
    except untrusted.Unreadable as error:
        return Condition(state=Completeness.UNKNOWN, why=str(error))
    return Condition(state=Completeness.TORN if problem else Completeness.COMPLETE, why=problem)


# ---- files


def file_problem(path: Path) -> str:
    """Return why a file is incomplete, such as ``model.pt is truncated: …``; "" if it seems whole."""
    size = path.stat().st_size
    if size == 0:
        return f"{path.name} is empty"
    if path.suffix == ".safetensors":
        return _named(path, _safetensors_problem(path, size))
    if path.suffix not in _TORCH_SUFFIXES:
        return ""
    with path.open("rb") as stream:
        begin = stream.read(16)
    if begin.startswith(_ZIP_BEGIN):
        return _named(path, _zip_problem(path, size))
    # The format before torch 1.6 has no directory; another program's file is not ours to judge.
    return "" if any(begin) else f"{path.name} begins with zeros: the write did not finish"


def _named(path: Path, problem: str) -> str:
    return f"{path.name} {problem}" if problem else ""


def _zip_problem(path: Path, size: int) -> str:
    """Compare a torch.save file with the zip directory at its end."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception:  # BadZipFile, and others for damaged numbers
        return f"is truncated: {size:,} bytes, without the zip directory at the end"
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        return "was not written by torch.save: it contains no data.pkl"
    if any(entry.header_offset + entry.compress_size > size for entry in entries):
        return f"is truncated: its zip directory refers to data beyond its {size:,} bytes"
    return ""


def _safetensors_problem(path: Path, size: int) -> str:
    """Compare a safetensors file with its header, which is at its beginning."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MOST_HEAD_BYTES:
            return "does not begin with the header of a safetensors file"
        if length > _MOST_JSON_BYTES and size >= 8 + length:
            raise untrusted.Unreadable(
                f"the header of {path.name} is larger than {_MOST_JSON_BYTES:,} bytes"
            )
        text = stream.read(min(length, size))
    if len(text) < length:
        return f"is truncated: its header alone is longer than its {size:,} bytes"
    try:
        content = untrusted.parse_json(text)
        ends = [int(one["data_offsets"][1]) for key, one in content.items() if key[:2] != "__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
        return "has an invalid header"
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        return f"is truncated: {size:,} of {needed:,} bytes"
    return ""


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is not JSON; raise Unreadable if it is too large to check."""
    data = untrusted.read_bounded(path, _MOST_JSON_BYTES)
    with contextlib.suppress(untrusted.Unreadable):
        return untrusted.parse_json(data)
    return None


# ---- folders


def _folder_problem(folder: Path, library: str) -> str:
    inside = [*itertools.islice(folder.rglob("*"), _MOST_FILES + 1)]
    if len(inside) > _MOST_FILES:
        raise untrusted.Unreadable(f"it contains more than {_MOST_FILES:,} files")
    files = [path for path in sorted(inside) if path.is_file()]
    if not files:
        return "the folder is empty"
    if (folder / _UNFINISHED).exists():
        return f"{_UNFINISHED} exists: the save did not finish"
    sharded = {folder} if library == "DCP" else set()
    sharded |= {path.parent for path in files if path.name == _METADATA or path.suffix == ".distcp"}
    checks: list[Iterable[str]] = [
        _required(folder, library),
        (_sharded_problem(one) for one in sorted(sharded)),
        (_index_problem(path) for path in files if path.name.endswith(".index.json")),
        (file_problem(path) for path in files),
    ]
    return next((problem for check in checks for problem in check if problem), "")


def _required(folder: Path, library: str) -> Iterator[str]:
    """Yield what is missing of the files that a library always writes."""
    names = {path.name for path in folder.iterdir()}
    if library == "transformers":
        yield from _trainer_problems(folder, names)
    elif library == "accelerate":
        yield _missing_number(names, "random_states_{}.pkl", _WRITTEN_LAST)
    elif library == "deepspeed" and not any(name.endswith("model_states.pt") for name in names):
        yield "the model's weights are missing"
    elif library == "lightning" and _METADATA in names and "meta.pt" not in names:
        yield f"meta.pt is missing{_WRITTEN_LAST}"


def _trainer_problems(folder: Path, names: set[str]) -> Iterator[str]:
    if _STATE not in names:
        yield f"{_STATE} is missing{_WRITTEN_LAST}"
        return
    state = _read_json(folder / _STATE)
    if not isinstance(state, dict) or "global_step" not in state:
        yield f"{_STATE} is truncated"

    def any_begins(*beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in names)

    # DeepSpeed writes weights, optimizer and scheduler into a folder of its own.
    if not any(map(_WEIGHTS.fullmatch, names)) and not any_begins(
        "pytorch_model_fsdp", "global_step"
    ):
        yield "the model's weights are missing"
    has = {
        "optimizer.pt": any_begins("optimizer", "global_step"),
        "scheduler.pt": any_begins("scheduler", "global_step"),
        "rng_state.pth": any_begins("rng_state"),
    }
    # With save_only_model there is none of them.
    if any(has.values()):
        yield from (f"{name} is missing" for name, is_there in has.items() if not is_there)
    if any_begins("rng_state_"):
        yield _missing_number(names, "rng_state_{}.pth")


def _missing_number(names: set[str], pattern: str, note: str = "") -> str:
    """Return which of the files 0, 1, … of the ranks is missing."""
    before, _, after = pattern.partition("{}")
    numbers = {
        int(middle)
        for name in names
        if name.startswith(before) and name.endswith(after)
        if (middle := name[len(before) : len(name) - len(after)]).isdecimal()
    }
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if numbers and missing == len(numbers):
        return ""
    return f"{pattern.format(missing)} is missing{note}"


def _index_problem(path: Path) -> str:
    """Return which file of a model in several files is missing."""
    content = _read_json(path)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict):
        return f"{path.name} is truncated"
    wanted = {str(name) for name in shards.values()}
    missing = sorted(name for name in wanted if not (path.parent / Path(name).name).is_file())
    more = f", and {len(missing) - 1} more of {len(wanted)}" if len(missing) > 1 else ""
    return f"{missing[0]} is missing{more}" if missing else ""


# ---- torch.distributed.checkpoint


def _sharded_problem(folder: Path) -> str:
    """Compare the files of DCP with its description of them, ``.metadata``, which it writes last."""
    described = [folder / _METADATA]
    if not described[0].exists():  # without collectives, each rank writes its own
        described = sorted(folder.glob(f"__*{_METADATA}"))
    shards = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    if not described:
        if not shards and any(folder.glob("*.safetensors")):  # DCP in Hugging Face's format
            return ""
        return f"{_METADATA} is missing{_WRITTEN_LAST}"
    for path in described:
        size = path.stat().st_size
        if size > _MOST_METADATA_BYTES:
            continue
        try:
            needed = sizes_in_metadata(untrusted.read_bounded(path, _MOST_METADATA_BYTES))
        except ValueError:
            return f"{path.name} is truncated: {size:,} bytes"
        for name, least in sorted(needed.items()):
            if name not in shards:
                return f"{name} is missing"
            if shards[name] < least:
                return f"{name} is truncated: {shards[name]:,} of {least:,} bytes"
    return next((f"{name} is empty" for name, size in shards.items() if not size), "")


_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_STORED, _FETCHED = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_FRAMES = {"FRAME", "PROTO"}


def sizes_in_metadata(data: bytes) -> dict[str, int]:
    """Return the files that DCP's ``.metadata`` refers to, with the minimum size of each.

    The metadata is a pickle that is parsed, never executed. ValueError if it is truncated.
    """
    found: dict[str, int] = {}
    memo: dict[int, str | int | None] = {}
    newest: str | int | None = None
    values: deque[str | int] = deque(maxlen=6)
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in _FRAMES:
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = newest
            continue
        if name in _STORED:
            memo[int(argument or 0)] = newest
            continue
        newest = None
        if name in _TEXTS or name in _NUMBERS:
            newest = argument
        elif name in _FETCHED:
            newest = memo.get(int(argument or 0))
        if newest is None:
            continue
        values.append(newest)
        if isinstance(newest, str) and newest.endswith(".distcp"):
            found.setdefault(newest, 0)
        match tuple(values):
            case ("relative_path", str(file), "offset", int(offset), "length", int(length)):
                found[file] = max(found.get(file, 0), offset + length)
    return found
