"""Export a checkpoint's weights as a folder of safetensors that transformers or peft can load.

Pieces of tensors are copied from the ranks' files to the new ones, a few MiB at a time: neither a
tensor nor a file is ever fully in memory. The ranks' files are read one after another, each once.
"""

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchmuster.checkpoints.model_class import set_dtype
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_file import (
    ELEMENT_BYTES,
    INDEX,
    Chunk,
    Index,
    file_head,
    read_file_head,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.units import format_bytes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# "default" is peft's name for a single adapter, which does not appear in its files.
_DEFAULT = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
_WHOLE_COPY = ".modules_to_save.default."


def name_in_adapter(name: str) -> str | None:
    """Return the name of a trained weight in peft's file; None for a weight of the base model."""
    if _WHOLE_COPY in name:
        return name.replace(_WHOLE_COPY, ".")
    if ".lora_" not in name:
        return None
    return _DEFAULT.sub(r"\1", name)


_MODEL = "model."
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_MOST_IN_A_FILE_BYTES = 2 * 10**9
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    beside: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor's bytes begin in the new folder."""

    file: str
    begin: int


def export_weights(
    store: Store,
    name: str,
    folder: Path,
    *,
    beside: Path | None = None,
    as_it_is: bool = False,
    finish: Callable[[Path], None] = lambda folder: None,
    most_in_a_file_bytes: int = _MOST_IN_A_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write the weights of a verified checkpoint to a new folder, under the model's own names.

    ``beside`` is a folder whose files are copied next to them: config.json and the tokenizer. If it
    has an adapter_config.json, only the LoRA matrices are written, in peft's format. A checkpoint
    with LoRA but without that file is rejected unless ``as_it_is``: next to a config.json, its
    names would load random weights. The folder appears when it is complete and ``finish``, which
    may check or change it, has returned. ``on_bytes`` is called for each piece. Of tied parameters
    only the first is written.
    """
    index = _export_weights(store, name)
    adapter = not as_it_is and beside is not None and (beside / ADAPTER_CONFIG).is_file()
    if not as_it_is:
        index = _adapter(store, name, index) if adapter else _without_adapter(store, name, index)
    folder = folder.absolute()
    _refuse_what_cannot_be(folder, index)
    unfinished = folder.parent / f".{folder.name}.{os.urandom(4).hex()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        files = (
            {ADAPTER_WEIGHTS: list(index.tensors)}
            if adapter
            else _export_files(index, most_in_a_file_bytes)
        )
        places = _write_heads(unfinished, files, index)
        _copy_chunks(store, name, unfinished, index, places, on_bytes)
        if len(files) > 1:
            _write_map(unfinished, index, places)
        if beside is not None:
            shutil.copytree(beside, unfinished, dirs_exist_ok=True)
            set_dtype(unfinished, _dtype_of(index))
        finish(unfinished)
        _make_durable(unfinished)
        exported = _exported(unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise MusterError(
            f"cannot write the weights to {folder}",
            why=error.strerror or str(error),
            fix="free disk space there, or use another folder: --to",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported


def contiguous_runs(
    whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> tuple[int, Iterator[int]]:
    """Return the layout of a piece within its tensor: the length of its runs, and their offsets.

    The runs are in the order of the piece's own elements.
    """
    if math.prod(shape) == 0:
        return 0, iter(())
    # From this dimension on the piece is as wide as the tensor, so its rows are contiguous.
    full = len(whole)
    while full > 0 and shape[full - 1] == whole[full - 1]:
        full -= 1
    first = max(full - 1, 0)
    strides = [math.prod(whole[one + 1 :]) for one in range(len(whole))]
    start = sum(begin * stride for begin, stride in zip(offset, strides, strict=True))
    steps = [range(0, extent * strides[at], strides[at]) for at, extent in enumerate(shape[:first])]
    starts = (start + sum(place) for place in itertools.product(*steps))
    return math.prod(shape[first:]), starts


def _export_weights(store: Store, name: str) -> Index:
    """Return the index of the model's tensors only, under the model's own names."""
    try:
        index = Index.read(store, name)
    except (ValueError, FileNotFoundError) as error:
        raise _strange(store, name, INDEX, str(error)) from None
    tensors = {
        one.removeprefix(_MODEL): tensor
        for one, tensor in index.tensors.items()
        if one.startswith(_MODEL)
    }
    if not tensors:
        raise Impossible(
            f"{name} has no weights to export",
            why=f"none of its {len(index.tensors)} tensors has a name that begins with {_MODEL}",
            fix="export a checkpoint that a training run saved: muster checkpoint ls shows them",
        )
    return Index(tensors=tensors)


def _adapter(store: Store, name: str, index: Index) -> Index:
    """Return the LoRA matrices only, under peft's names."""
    tensors = {
        other: tensor
        for one, tensor in index.tensors.items()
        if (other := name_in_adapter(one)) is not None
    }
    if not tensors:
        raise _strange(
            store,
            name,
            INDEX,
            f"the run trained a LoRA adapter, but none of {len(index.tensors)} tensors belongs "
            f"to it",
        )
    return Index(tensors=tensors)


def _without_adapter(store: Store, name: str, index: Index) -> Index:
    lora = [one for one in index.tensors if name_in_adapter(one) is not None]
    if lora:
        raise Impossible(
            f"{name} is a LoRA checkpoint, but its {ADAPTER_CONFIG} is missing",
            why=f"{len(lora)} of its {len(index.tensors)} tensors belong to LoRA, such as "
            f"{lora[0]}; without that file "
            "no program can load them",
            fix="export the run instead of its checkpoints: muster checkpoint export RUN",
        )
    return index


def _size_bytes(index: Index) -> int:
    return sum(one.size_bytes for one in index.tensors.values())


def _dtype_of(index: Index) -> str:
    """Return the floating-point dtype that takes the most bytes, as config.json writes it."""
    sizes = dict.fromkeys(_DTYPES, 0)
    for one in index.tensors.values():
        if one.dtype in sizes:
            sizes[one.dtype] += one.size_bytes
    return _DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def _refuse_what_cannot_be(folder: Path, index: Index) -> None:
    if folder.exists():
        raise Impossible(
            f"{folder} already exists",
            why="an export does not overwrite files that another program may be reading",
            fix="use a folder that does not exist yet: --to",
        )
    home = folder.parent
    while not home.exists():
        home = home.parent
    free_bytes, needed_bytes = shutil.disk_usage(home).free, _size_bytes(index)
    if needed_bytes > free_bytes:
        raise Impossible(
            f"not enough space for the weights in {folder}",
            why=f"they take {format_bytes(needed_bytes)}, but {format_bytes(free_bytes)} are free",
            fix="free disk space there, or use another folder: --to",
        )


def _export_files(index: Index, most_bytes: int) -> dict[str, list[str]]:
    """Split the tensors into files, in their order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in index.tensors.items():
        if groups[-1] and filled + tensor.size_bytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_heads(folder: Path, files: Mapping[str, list[str]], index: Index) -> dict[str, _Place]:
    """Create the files at full size, without the tensors' bytes; return where those belong."""
    places = {}
    for file, unsorted in files.items():
        # Sorted by element size, so that each tensor is aligned to it, as readers expect.
        names = sorted(unsorted, key=lambda one: -ELEMENT_BYTES[index.tensors[one].dtype])
        described = [(one, index.tensors[one].dtype, index.tensors[one].shape) for one in names]
        beginning = file_head(described, metadata={"format": "pt"})
        end = len(beginning)
        for one in names:
            places[one] = _Place(file=file, begin=end)
            end += index.tensors[one].size_bytes
        with (folder / file).open("xb") as stream:
            stream.write(beginning)
            stream.truncate(end)
    return places


def _copy_chunks(
    store: Store,
    name: str,
    folder: Path,
    index: Index,
    places: Mapping[str, _Place],
    on_bytes: Callable[[int], None],
) -> None:
    by_source: dict[str, list[tuple[str, Chunk]]] = {}
    for tensor, stored in index.tensors.items():
        for chunk in stored.pieces():
            by_source.setdefault(chunk.file, []).append((tensor, chunk))
    sizes = store.sizes(name)
    for source, chunks in sorted(by_source.items()):
        try:
            with store.open(name, source) as stream:
                entries = read_file_head(stream, sizes.get(source, 0))
                for tensor, chunk in sorted(chunks, key=lambda one: entries[one[1].key].begin):
                    stored = index.tensors[tensor]
                    entry = entries[chunk.key]
                    if (entry.dtype, entry.shape) != (stored.dtype, chunk.shape):
                        raise ValueError(f"{chunk.key} does not match {INDEX}")
                    with (folder / places[tensor].file).open("r+b") as target:
                        stream.seek(entry.begin)
                        runs = _byte_runs(stored.dtype, stored.shape, chunk)
                        _copy_runs(stream, target, places[tensor].begin, *runs, on_bytes)
        except (KeyError, ValueError, FileNotFoundError) as error:
            raise _strange(store, name, source, str(error)) from error


def _byte_runs(dtype: str, whole: Sequence[int], chunk: Chunk) -> tuple[int, Iterator[int]]:
    length, starts = contiguous_runs(whole, chunk.offset, chunk.shape)
    element_bytes = ELEMENT_BYTES[dtype]
    return length * element_bytes, (one * element_bytes for one in starts)


def _copy_runs(
    source: BinaryIO,
    target: BinaryIO,
    begin: int,
    run_bytes: int,
    starts: Iterator[int],
    on_bytes: Callable[[int], None],
) -> None:
    """Copy the next bytes of the source to their positions, run by run."""
    for start in starts:
        target.seek(begin + start)
        left = run_bytes
        while left:
            piece = source.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ValueError("unexpected end of file")
            target.write(piece)
            on_bytes(len(piece))
            left -= len(piece)


def _write_map(folder: Path, index: Index, places: Mapping[str, _Place]) -> None:
    content = {
        "metadata": {"total_size": _size_bytes(index)},
        "weight_map": {name: place.file for name, place in places.items()},
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _exported(folder: Path) -> Exported:
    """Read the written files back, and verify them."""
    tensors, size_bytes = 0, 0
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            entries = read_file_head(stream, file.stat().st_size)
        tensors += len(entries)
        size_bytes += sum(one.end - one.begin for one in entries.values())
    others = sorted(one.name for one in folder.iterdir() if ".safetensors" not in one.name)
    return Exported(
        files=tuple(one.name for one in files),
        tensors=tensors,
        size_bytes=size_bytes,
        beside=tuple(others),
    )


def _make_durable(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _strange(store: Store, name: str, file: str, why: str) -> MusterError:
    return MusterError(
        f"cannot export {name}: {file} is damaged",
        why=why,
        fix=f"muster checkpoint verify {store.where} {name} shows the damage; use another "
        "checkpoint",
    )
