"""Ask a fresh process to export a checkpoint, or to check a folder of weights.

The process is ``torchmuster.worker.exported``: it imports torch and the library that will load the
weights. It reads an :class:`ExportRequest` from standard input and prints an :class:`ExportResult`,
both as one line of JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from torchmuster.checkpoints.manifest import Manifest
from torchmuster.checkpoints.store import FolderStore, Store, decode_strictly
from torchmuster.errors import Impossible, MusterError

PROGRAM = "torchmuster.worker.exported"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Largest differences of logits, relative to the largest logit.
MERGED = 1e-4  # LoRA matrices added to float32 weights: sums in another order
SIXTEEN_BITS = 0.1  # weights or computation in 16 bits on one side only

# Download nothing, show no progress bars or warnings, and leave the GPUs to the training.
_SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
}
# A rank's place in its process group, which the new process does not join.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# "default" is peft's name for a single adapter, which does not appear in its files.
_DEFAULT = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
_WHOLE_COPY = ".modules_to_save.default."


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to export to a new folder; without a checkpoint, a folder of weights to check.

    ``beside`` is a folder whose files are copied next to the weights: config.json and the tokenizer.
    If it has an adapter_config.json, only the LoRA matrices are written, in peft's format.
    ``as_it_is``: the names are those of the user's own model.
    """

    folder: str
    checkpoint: str | None = None
    beside: str | None = None
    as_it_is: bool = False
    merge: bool = False  # merge the adapter into the base model
    base_dtype: str = "float32"  # dtype of an adapter's base model in the run


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was written and checked; an error has ``what``."""

    files: tuple[str, ...] = ()  # of weights
    compared: int = 0  # tensors that are equal to the checkpoint's, bit by bit
    size_bytes: int = 0  # of the files
    beside: tuple[str, ...] = ()
    difference: float | None = None  # of the merged model's logits, relative to the largest one
    unchecked: str = ""  # what was not compared, and why
    what: str = ""
    why: str = ""
    fix: str = ""
    is_impossible: bool = False  # the error is one of the request


def run_exporter(request: ExportRequest, *, limit_s: float | None = None) -> ExportResult:
    """Export or check in a fresh process; raise an error if the weights are wrong.

    A process that takes longer than ``limit_s`` seconds is killed: then nothing was compared.
    Its progress and a traceback appear on standard error.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", PROGRAM],
            input=msgspec.json.encode(request).decode(),
            env={**environment, **_SURROUNDINGS},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return ExportResult(
            unchecked=f"names not compared: the check took longer than {limit_s:.0f} s"
        )
    try:
        result = decode_strictly(done.stdout.splitlines()[-1].encode(), ExportResult)
    except (IndexError, ValueError):
        raise MusterError(
            f"{Path(request.folder).name} was not checked: the process ended with {done.returncode}",
            fix="see its output above; for lack of memory, use a host with more memory",
        ) from None
    if result.what:
        kind = Impossible if result.is_impossible else MusterError
        raise kind(result.what, why=result.why, fix=result.fix)
    return result


@contextmanager
def local_checkpoint(store: Store, manifest: Manifest) -> Iterator[Path]:
    """Yield the folder of a checkpoint; one in object storage is downloaded into a temporary folder."""
    if isinstance(store, FolderStore):
        yield store.folder / manifest.name
        return
    with tempfile.TemporaryDirectory(prefix="muster-export-") as temporary:
        local = FolderStore(Path(temporary))
        local.write(manifest.name, "manifest.json", manifest.to_json())
        for file in manifest.files:
            store.download(manifest.name, file, local.folder / manifest.name / file)
        yield local.folder / manifest.name


def name_in_adapter(name: str) -> str | None:
    """Return the name of a trained weight in peft's file; None for a weight of the base model."""
    if _WHOLE_COPY in name:
        return name.replace(_WHOLE_COPY, ".")
    if ".lora_" not in name:
        return None
    return _DEFAULT.sub(r"\1", name)


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
