"""Export a checkpoint, and check weights with the library that will load them, in a separate process.

``python -m torchmuster.worker.exported`` reads an :class:`~torchmuster.checkpoints.export.ExportRequest`
from standard input and prints an :class:`~torchmuster.checkpoints.export.ExportResult`. It makes
these checks:

1. Every tensor, read back from the written files, is the checkpoint's.
2. transformers, or peft, finds exactly its weights in the folder: no name is missing, unexpected or
   of another shape.
3. A merged model, loaded from the folder, gives the same logits as the adapter on its base model.
"""

import importlib
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from torchmuster.checkpoints.export import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGED,
    SIXTEEN_BITS,
    ExportRequest,
    ExportResult,
    files_of_weights,
    name_in_adapter,
)
from torchmuster.checkpoints.manifest import read_manifest
from torchmuster.checkpoints.model_class import class_in_folder, set_dtype
from torchmuster.checkpoints.store import FolderStore, decode_strictly
from torchmuster.errors import Impossible, MusterError, first_line
from torchmuster.train.models import hugging_face
from torchmuster.train.models.hugging_face import weights_dtype
from torchmuster.train.weights import (
    MOST_IN_A_FILE_BYTES,
    compare_hashes,
    replaced_folder,
    some_names,
    write_files,
)
from torchmuster.units import format_bytes

_MODEL = "model."

_TOKENS = 16  # that logits are compared on


class Unchecked(Exception):
    """The reason why something cannot be checked here."""


def export_weights(
    request: ExportRequest,
    *,
    most_in_a_file_bytes: int = MOST_IN_A_FILE_BYTES,
    finish: Callable[[Path], ExportResult] | None = None,
) -> ExportResult:
    """Write the weights of a verified checkpoint to a new folder, under the model's own names; check them.

    A checkpoint with LoRA but without adapter_config.json is rejected unless ``as_it_is``: next to a
    config.json, its names would load random weights. The folder appears when it is complete and
    checked by ``finish`` (default: :func:`check`). Of tied parameters only the first is written.
    """
    assert request.checkpoint is not None
    source, folder = Path(request.checkpoint), Path(request.folder).absolute()
    beside = None if request.beside is None else Path(request.beside)
    adapter = not request.as_it_is and beside is not None and (beside / ADAPTER_CONFIG).is_file()
    try:
        stored = _stored_weights(source)
        own_names = {name: name.removeprefix(_MODEL) for name in stored}
        if not request.as_it_is:
            own_names = _for_peft(source.name, own_names, adapter=adapter)
        sizes = {own: _size_bytes(stored[name]) for name, own in own_names.items()}
        _refuse_unwritable(folder, sum(sizes.values()))
        files = {ADAPTER_WEIGHTS: list(sizes)}
        if not adapter:
            files = files_of_weights(sizes, most_in_a_file_bytes)
        with replaced_folder(folder) as unfinished:
            hashes = write_files(unfinished, _read(source, stored, own_names, files), files)
            if beside is not None:
                shutil.copytree(beside, unfinished, dirs_exist_ok=True)
                set_dtype(unfinished, _main_dtype(stored[name] for name in own_names))
            compared = compare_hashes(unfinished, hashes)
            print("checking the export", file=sys.stderr, flush=True)
            checked = (finish or (lambda folder: check(folder, request)))(unfinished)
    except OSError as error:
        raise MusterError(
            f"cannot write the weights to {folder}",
            why=error.strerror or str(error),
            fix="free disk space there, or use another folder: --to",
        ) from error
    except (ValueError, SafetensorError, CheckpointException) as error:
        raise MusterError(
            f"cannot export {source.name}: its files are damaged",
            why=f"{type(error).__name__}: {error}",
            fix="use another checkpoint; muster checkpoint verify shows the damage",
        ) from error
    written = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    weights = [name for name in written if name.endswith(".safetensors")]
    return msgspec.structs.replace(
        checked,
        files=tuple(weights),
        compared=compared,
        size_bytes=sum(written[name] for name in weights),
        beside=tuple(name for name in written if ".safetensors" not in name),
    )


def check(folder: Path, request: ExportRequest) -> ExportResult:
    """Merge the adapter if requested, and check the folder; raise an error if it is wrong."""
    expected = None
    if request.merge:
        try:
            expected = merge(folder, dtype=request.base_dtype)
        except Unchecked as error:
            raise MusterError(
                "cannot merge the adapter here",
                why=str(error),
                fix="export it without --merge, or run this on a machine that has the base model, "
                "transformers and peft",
            ) from error
    try:
        check_names(folder)
        if expected is None:
            return ExportResult()
        limit = MERGED if request.base_dtype == "float32" else SIXTEEN_BITS
        return ExportResult(difference=compare_logits(folder, expected, limit))
    except Unchecked as error:
        return ExportResult(unchecked=f"names not compared: {error}")


def _stored_weights(source: Path) -> dict[str, TensorStorageMetadata]:
    """Return the model's tensors in a checkpoint, in the model's order."""
    manifest = read_manifest(FolderStore(source.parent), source.name)
    state = None if manifest is None else manifest.state
    stored = HuggingFaceStorageReader(str(source)).read_metadata().state_dict_metadata
    weights = {}
    for name in state.get("model", ()) if isinstance(state, dict) else ():
        metadata = stored.get(f"{_MODEL}{name}")
        if isinstance(metadata, TensorStorageMetadata):
            weights[f"{_MODEL}{name}"] = metadata
    if not weights:
        raise Impossible(
            f"{source.name} has no weights to export",
            why=f"none of its {len(stored)} tensors has a name that begins with {_MODEL}",
            fix="export a checkpoint that a training run saved: muster checkpoint list shows them",
        )
    return weights


def _for_peft(checkpoint: str, own_names: dict[str, str], *, adapter: bool) -> dict[str, str]:
    """Return the LoRA matrices only, with peft's names, if an adapter is to be written."""
    trained = {}
    for name, own in own_names.items():
        name_of_peft = name_in_adapter(own)
        if name_of_peft is not None:
            trained[name] = name_of_peft
    if adapter and not trained:
        raise MusterError(
            f"cannot export {checkpoint}: the run trained a LoRA adapter",
            why=f"none of {len(own_names)} tensors in the checkpoint belongs to it",
            fix="use another checkpoint of the run: muster checkpoint list shows them",
        )
    if trained and not adapter:
        raise Impossible(
            f"{checkpoint} is a LoRA checkpoint, but its {ADAPTER_CONFIG} is missing",
            why=f"{len(trained)} of its {len(own_names)} tensors belong to LoRA; without that file no "
            "program can load them",
            fix="export the run instead of its checkpoints: muster checkpoint export RUN",
        )
    return trained if adapter else own_names


def _read(
    source: Path,
    stored: Mapping[str, TensorStorageMetadata],
    own_names: Mapping[str, str],
    files: Mapping[str, list[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor under its own name; the tensors of one file are in memory at a time."""
    stored_name = {own: name for name, own in own_names.items()}
    for file, names in files.items():
        print(f"writing {file}", file=sys.stderr, flush=True)
        content = {}
        for own in names:
            metadata = stored[stored_name[own]]
            content[stored_name[own]] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as requested
            load(
                content,
                storage_reader=HuggingFaceStorageReader(str(source)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
        for own in names:
            yield own, content.pop(stored_name[own])


def _size_bytes(metadata: TensorStorageMetadata) -> int:
    return metadata.size.numel() * metadata.properties.dtype.itemsize


def _main_dtype(weights: Iterator[TensorStorageMetadata]) -> str:
    """Return the floating-point dtype that takes the most bytes, as config.json writes it."""
    sizes: dict[str, int] = {"float32": 0}
    for metadata in weights:
        dtype = metadata.properties.dtype
        if dtype.is_floating_point:
            name = str(dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + _size_bytes(metadata)
    return max(sizes, key=lambda name: sizes[name])


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


def check_names(folder: Path) -> None:
    """Raise an error unless transformers, or peft, finds exactly its weights in the folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        _check_adapter(folder)
    elif (folder / "config.json").is_file():
        _check_model(folder)
    else:
        raise Unchecked("there is no config.json, so no library can build the model")


def merge(folder: Path, *, dtype: str) -> torch.Tensor | None:
    """Replace an adapter by the full model, merged into the base model's weights; return its logits.

    The base model is loaded in ``dtype``. The logits are those of the adapter on its base model,
    before the merge.
    """
    transformers = _library("transformers")
    check_names(folder)
    generation = folder / transformers.utils.GENERATION_CONFIG_NAME
    config_of_base = generation.read_bytes() if generation.is_file() else None
    model = _adapted(folder, dtype)
    expected = logits_of(model)
    merged = model.merge_and_unload(safe_merge=True)
    # transformers refuses to save an invalid generation config; keep the base model's file.
    merged.generation_config = transformers.GenerationConfig()
    merged.save_pretrained(folder, max_shard_size="2GB")
    if config_of_base is None:
        generation.unlink(missing_ok=True)
    else:
        generation.write_bytes(config_of_base)
    set_dtype(folder, weights_dtype(merged.parameters()))
    (folder / ADAPTER_CONFIG).unlink()
    (folder / ADAPTER_WEIGHTS).unlink()
    return expected


def logits_of(model: Any) -> torch.Tensor | None:
    """Return a model's logits for some tokens from a fixed seed; None if it does not take tokens."""
    text = model.config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary is None:
        return None
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits.float()


def compare_logits(folder: Path, expected: torch.Tensor, limit: float) -> float:
    """Compare logits of the merged model in a folder with those before the merge; return the difference."""
    auto = getattr(_library("transformers"), class_in_folder(folder).value.auto)
    logits = logits_of(auto.from_pretrained(folder, local_files_only=True))
    assert logits is not None, "the merged model takes the same inputs"
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference <= limit:  # also if it is NaN
        raise MusterError(
            "the export is wrong: the loaded model gives other logits than the trained model",
            why=f"they differ by {difference:.2g} of the largest logit; the limit is {limit:g}",
            fix="check that model/ in the run folder is unchanged, and that transformers has the "
            "version that the run used; if the trained model's own logits are not finite, export an "
            "earlier checkpoint: muster checkpoint list shows them",
        )
    return difference


def _adapted(folder: Path, dtype: str) -> Any:
    """Load an adapter on its base model."""
    peft = _library("peft")
    base = _base(peft.PeftConfig.from_pretrained(folder))
    model = _auto_class(base).from_pretrained(
        base["name"], revision=base["revision"], dtype=dtype, local_files_only=True
    )
    return peft.PeftModel.from_pretrained(model, folder)


def _check_model(folder: Path) -> None:
    transformers = _library("transformers")
    # On the meta device no weight is read, only names and shapes; transformers needs accelerate for that.
    options: dict[str, Any] = {}
    if importlib.util.find_spec("accelerate"):
        options["device_map"] = "meta"
    try:
        _, loading = getattr(transformers, class_in_folder(folder).value.auto).from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:  # any error: the user would see it too
        raise MusterError(
            "the export is invalid: transformers cannot load it",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix="check that model/ in the run folder is unchanged, and that transformers has the "
            "version that the run used",
        ) from error
    _refuse(
        {
            "missing": loading["missing_keys"],
            "not in the model": loading["unexpected_keys"],
            "of another shape": loading["mismatched_keys"],
        }
    )


def _check_adapter(folder: Path) -> None:
    peft, transformers = _library("peft"), _library("transformers")

    config = peft.PeftConfig.from_pretrained(folder)
    base = _base(config)
    described = transformers.AutoConfig.from_pretrained(
        base["name"], revision=base["revision"], local_files_only=True
    )
    with torch.device("meta"):
        model = _auto_class(base).from_config(described)
        adapted = peft.get_peft_model(model, config)
    expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _refuse(
        {
            "missing": sorted(expected.keys() - shapes.keys()),
            "not in the model": sorted(shapes.keys() - expected.keys()),
            "of another shape": [
                name
                for name, tensor in expected.items()
                if shapes.get(name, tensor.shape) != tuple(tensor.shape)
            ],
        }
    )


def _auto_class(base: Mapping[str, Any]) -> Any:
    """Return the class of a base model, as the run chose it."""
    kind = hugging_face.model_class(hugging_face.find_model(base["name"])).value
    return getattr(_library("transformers"), kind.auto)


def _base(config: Any) -> dict[str, Any]:
    """Return the path of an adapter's base model, which must be on this host."""
    transformers = _library("transformers")
    name, revision = config.base_model_name_or_path, config.revision
    if not name:
        raise Unchecked("its base model is built by your code (model.build)")
    try:
        transformers.AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Unchecked(f"its base model {name} is not on this host") from error
    return {"name": name, "revision": revision}


def _refuse(wrong: Mapping[str, Sequence[Any]]) -> None:
    lines = [f"{kind}: {some_names(names)}" for kind, names in wrong.items() if names]
    if lines:
        raise MusterError(
            "the export is invalid: its weights do not match the config next to them",
            why="\n".join(lines),
            fix="check that model/ in the run folder is unchanged",
        )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unchecked(f"cannot import {name} here: {first_line(error)}") from error


def main() -> None:
    """Export or check, and print the result."""
    request = decode_strictly(sys.stdin.buffer.read(), ExportRequest)
    try:
        if request.checkpoint is None:
            result = check(Path(request.folder), request)
        else:
            result = export_weights(request)
    except MusterError as error:
        result = ExportResult(
            what=error.what,
            why=error.why,
            fix=error.fix,
            is_impossible=isinstance(error, Impossible),
        )
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
