"""Export a checkpoint's weights as a folder of safetensors that transformers or peft can load.

One tensor after another is put together from the ranks' files, written, read back and compared: only one is in
memory at a time.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.checkpoints.manifest import Manifest
from torchmuster.checkpoints.model_class import set_dtype
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_files import (
    ELEMENT_BYTES,
    StoredTensor,
    file_head,
    read_tensors,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.units import format_bytes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MODEL = "model."
# "default" is peft's name for a single adapter, which does not appear in its files.
_DEFAULT = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
_WHOLE_COPY = ".modules_to_save.default."
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_MOST_IN_A_FILE_BYTES = 2 * 10**9


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    files: tuple[str, ...]
    compared: int  # tensors that are equal to the checkpoint's, bit by bit
    size_bytes: int  # of the files
    beside: tuple[str, ...]


def name_in_adapter(name: str) -> str | None:
    """Return the name of a trained weight in peft's file; None for a weight of the base model."""
    if _WHOLE_COPY in name:
        return name.replace(_WHOLE_COPY, ".")
    if ".lora_" not in name:
        return None
    return _DEFAULT.sub(r"\1", name)


def export_weights(
    store: Store,
    manifest: Manifest,
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
    may check or change it, has returned. ``on_bytes`` is called for each tensor. Of tied parameters
    only the first is written.
    """
    try:
        tensors = _weights(store, manifest)
    except (ValueError, OSError) as error:
        raise _damaged(store, manifest.name, str(error)) from None
    adapter = not as_it_is and beside is not None and (beside / ADAPTER_CONFIG).is_file()
    if not as_it_is:
        tensors = _for_peft(manifest.name, tensors, adapter=adapter)
    folder = folder.absolute()
    _refuse_unwritable(folder, sum(tensor.size_bytes for tensor in tensors.values()))
    unfinished = folder.parent / f".{folder.name}.{os.urandom(4).hex()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        files = {ADAPTER_WEIGHTS: list(tensors)}
        if not adapter:
            sizes = {name: tensor.size_bytes for name, tensor in tensors.items()}
            files = files_of_weights(sizes, most_in_a_file_bytes)
        for file, names in files.items():
            in_file = {name: tensors[name] for name in names}
            _write_file(unfinished / file, in_file, store, manifest.name, on_bytes)
        write_index(unfinished, files, sum(tensor.size_bytes for tensor in tensors.values()))
        if beside is not None:
            shutil.copytree(beside, unfinished, dirs_exist_ok=True)
            set_dtype(unfinished, _dtype_of(tensors.values()))
        finish(unfinished)
        _make_durable(unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise MusterError(
            f"cannot write the weights to {folder}",
            why=error.strerror or str(error),
            fix="free disk space there, or use another folder: --to",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    written = [name for name in sizes if name.endswith(".safetensors")]
    return Exported(
        files=tuple(written),
        compared=len(tensors),
        size_bytes=sum(sizes[name] for name in written),
        beside=tuple(name for name in sizes if ".safetensors" not in name),
    )


def files_of_weights(sizes: Mapping[str, int], most_bytes: int) -> dict[str, list[str]]:
    """Divide tensors among files, in their order, under the names that transformers gives to files."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size_bytes in sizes.items():
        if groups[-1] and filled + size_bytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def write_index(folder: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    """Write the index of a model in several files."""
    if len(files) == 1:
        return
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _weights(store: Store, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the model's tensors under the model's own names, in the model's order."""
    stored = read_tensors(store, manifest.name, manifest.files)
    state = manifest.state if isinstance(manifest.state, dict) else {}
    names = [f"{_MODEL}{name}" for name in state.get("model", ())]
    tensors = {name.removeprefix(_MODEL): stored[name] for name in names if name in stored}
    if not tensors:
        raise Impossible(
            f"{manifest.name} has no weights to export",
            why=f"none of its {len(stored)} tensors has a name that begins with {_MODEL}",
            fix="export a checkpoint that a training run saved: muster checkpoint list shows them",
        )
    return tensors


def _for_peft(
    checkpoint: str, tensors: dict[str, StoredTensor], *, adapter: bool
) -> dict[str, StoredTensor]:
    """Return the LoRA matrices only, under peft's names, if an adapter is to be written."""
    trained = {}
    for name, tensor in tensors.items():
        name_of_peft = name_in_adapter(name)
        if name_of_peft is not None:
            trained[name_of_peft] = tensor
    if adapter and not trained:
        raise MusterError(
            f"cannot export {checkpoint}: the run trained a LoRA adapter",
            why=f"none of {len(tensors)} tensors in the checkpoint belongs to it",
            fix="use another checkpoint of the run: muster checkpoint list shows them",
        )
    if trained and not adapter:
        raise Impossible(
            f"{checkpoint} is a LoRA checkpoint, but its {ADAPTER_CONFIG} is missing",
            why=f"{len(trained)} of its {len(tensors)} tensors belong to LoRA, such as "
            f"{next(iter(trained))}; without that file no program can load them",
            fix="export the run instead of its checkpoints: muster checkpoint export RUN",
        )
    return trained if adapter else tensors


def _dtype_of(tensors: Iterable[StoredTensor]) -> str:
    """Return the floating-point dtype that takes the most bytes, as config.json writes it."""
    sizes = dict.fromkeys(_DTYPES, 0)
    for tensor in tensors:
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.size_bytes
    return _DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def _refuse_unwritable(folder: Path, needed_bytes: int) -> None:
    if folder.exists():
        raise Impossible(
            f"{folder} already exists",
            why="an export does not overwrite files that another program may be reading",
            fix="use a folder that does not exist yet: --to",
        )
    home = folder.parent
    while not home.exists():
        home = home.parent
    free_bytes = shutil.disk_usage(home).free
    if needed_bytes > free_bytes:
        raise Impossible(
            f"not enough space for the weights in {folder}",
            why=f"they take {format_bytes(needed_bytes)}, but {format_bytes(free_bytes)} are free",
            fix="free disk space there, or use another folder: --to",
        )


def _write_file(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    store: Store,
    checkpoint: str,
    on_bytes: Callable[[int], None],
) -> None:
    """Write tensors one after another; then read each of them back and compare."""
    # Sorted by element size, so that each tensor is aligned to it, as readers expect.
    names = sorted(tensors, key=lambda name: -ELEMENT_BYTES[tensors[name].dtype])
    head = file_head([(name, tensors[name].dtype, tensors[name].shape) for name in names])
    digests = []
    with path.open("xb") as stream:
        stream.write(head)
        for name in names:
            try:
                content = _read_tensor(store, checkpoint, tensors[name])
            except (ValueError, FileNotFoundError) as error:
                raise _damaged(store, checkpoint, str(error)) from error
            stream.write(content)
            digests.append(hashlib.sha256(content).digest())
            on_bytes(len(content))
    with path.open("rb") as stream:
        stream.seek(len(head))
        for name, digest in zip(names, digests, strict=True):
            if hashlib.sha256(stream.read(tensors[name].size_bytes)).digest() != digest:
                raise MusterError(
                    "the written weights are wrong: reading them back gives other bytes",
                    why=f"{name} in {path.name} differs from the checkpoint",
                    fix="write them again; if this happens again, check the disk and the memory of this host",
                )


def _read_tensor(store: Store, checkpoint: str, tensor: StoredTensor) -> bytearray:
    """Put the rows of a tensor together from the ranks' files."""
    content = bytearray()
    for part in tensor.parts:
        rows = store.read(checkpoint, part.file, part.begin, part.begin + part.size_bytes)
        if len(rows) < part.size_bytes:
            raise ValueError(f"{part.file}: unexpected end of file")
        content += rows
    return content


def _make_durable(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _damaged(store: Store, name: str, why: str) -> MusterError:
    return MusterError(
        f"cannot export {name}: its files are damaged",
        why=why,
        fix=f"muster checkpoint verify {store.where} {name} shows the damage; use another checkpoint",
    )
