"""Check exported weights with the library that will load them, in a separate process.

``python -m torchmuster.worker.exported`` reads an :class:`~torchmuster.checkpoints.export_check.ExportCheck`
from standard input and prints a :class:`~torchmuster.checkpoints.export_check.CheckResult`. It makes
these checks, in this order:

1. transformers, or peft, finds exactly its weights in the folder: no name is missing, unexpected or
   of another shape.
2. Every tensor in the folder has the bits of the checkpoint's.
   Merged weights are in no checkpoint: instead, the model that the library loads gives the same
   logits as the run's model.
"""

import importlib
import importlib.util
import math
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from torchmuster.checkpoints.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_in_adapter
from torchmuster.checkpoints.export_check import MERGED, SIXTEEN_BITS, CheckResult, ExportCheck
from torchmuster.checkpoints.model_class import class_in_folder, set_dtype
from torchmuster.checkpoints.places import open_store
from torchmuster.checkpoints.store import Store, decode_strictly
from torchmuster.checkpoints.tensor_file import (
    FileEntry,
    Index,
    read_file_head,
)
from torchmuster.config.resolve import resolve_settings
from torchmuster.devices.readers.cpu import read_cpu
from torchmuster.errors import MusterError
from torchmuster.train.checkpointing.storage import DTYPES as STORED_DTYPES
from torchmuster.train.models import hugging_face
from torchmuster.train.models.factory import ModelRecipe
from torchmuster.train.models.hugging_face import DTYPES, weights_dtype
from torchmuster.train.models.logits import fixed_batch, is_quantized, largest_difference, logits_of
from torchmuster.train.weights import refuse_wrong_tensors, save_tensors, some_names
from torchmuster.train.world import World
from torchmuster.units import format_bytes
from torchmuster.worker.model import recipe_of

_MODEL = "model."
_CPU = torch.device("cpu")
# Memory that a model takes while it is loaded and computes one sample, besides its weights.
_MARGIN, _MARGIN_BYTES = 1.25, 256 * 2**20


class Unchecked(Exception):
    """The reason why something cannot be checked here."""


def check_export(request: ExportCheck) -> CheckResult:
    """Merge or convert the weights if requested, then check them; raise an error if they are wrong."""
    folder = Path(request.folder)
    if request.merge:
        try:
            merge(folder, dtype=request.base_dtype, written=request.dtype)
        except Unchecked as error:
            raise MusterError(
                "cannot merge the adapter here",
                why=str(error),
                fix="export it without --merge, or run this on a machine that has the base model, "
                "transformers and peft",
            ) from error
    elif request.dtype is not None:
        cast_weights(folder, request.dtype)
    unchecked = []
    try:
        check_names(folder)
    except Unchecked as error:
        unchecked.append(f"names not compared: {error}")
    tensors, source = 0, ""
    difference, limit = None, MERGED
    if request.merge:
        try:
            difference, limit = compare_logits(request)
        except Unchecked as error:
            unchecked.append(f"logits not compared: {error}")
    elif request.checkpoint is not None:
        tensors, source = compare_tensors(request), f"checkpoint {request.name}"
    return CheckResult(
        tensors=tensors,
        source=source,
        difference=difference,
        limit=limit,
        unchecked="; ".join(unchecked),
    )


def check_names(folder: Path) -> None:
    """Raise an error unless transformers, or peft, finds exactly its weights in the folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        _check_adapter(folder)
    elif (folder / "config.json").is_file():
        _check_model(folder)
    else:
        raise Unchecked("there is no config.json, so no library can build the model")


def merge(folder: Path, *, dtype: str, written: str | None = None) -> None:
    """Replace an adapter by the full model, merged into the base model's weights.

    The base model is loaded in ``dtype``; the result is converted to ``written`` if that is given.
    """
    transformers = _library("transformers")
    generation = folder / transformers.utils.GENERATION_CONFIG_NAME
    kept = generation.read_bytes() if generation.is_file() else None
    model = _adapted(folder, dtype)
    merged = model.merge_and_unload(safe_merge=True)
    if written is not None:
        merged = merged.to(DTYPES[written])
    # transformers refuses to save an invalid generation config; keep the base model's file.
    merged.generation_config = transformers.GenerationConfig()
    merged.save_pretrained(folder, max_shard_size="2GB")
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)  # save_pretrained gives mode 600
    if kept is None:
        generation.unlink(missing_ok=True)
    else:
        generation.write_bytes(kept)
    set_dtype(folder, weights_dtype(merged.parameters()))
    (folder / ADAPTER_CONFIG).unlink()
    (folder / ADAPTER_WEIGHTS).unlink()


def cast_weights(folder: Path, dtype: str) -> None:
    """Convert the floating-point weights in a folder, one file at a time."""
    total_bytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            tensors[name] = cast_tensor(name, tensor, dtype)
        total_bytes += sum(one.nbytes for one in tensors.values())
        save_tensors(tensors, file)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = msgspec.json.decode(index.read_bytes())
        content["metadata"]["total_size"] = total_bytes
        index.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    set_dtype(folder, dtype)


def cast_tensor(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor in another dtype; integers stay. Raise an error if a value overflows."""
    if not tensor.is_floating_point():
        return tensor
    made = tensor.to(DTYPES[dtype])
    if dtype == "float16" and bool((made.isinf() & tensor.isfinite()).any()):
        raise MusterError(
            f"{name} does not fit into float16",
            why=f"its largest value is {float(tensor.abs().max()):.3g}; float16 ends at 65504",
            fix="use --dtype bfloat16",
        )
    return made


def compare_tensors(request: ExportCheck) -> int:
    """Compare the bits of every tensor in the folder with the checkpoint's; return their number."""
    folder = Path(request.folder)
    files = {name: file for file in folder.glob("*.safetensors") for name in _names_in(file)}
    assert request.checkpoint is not None
    seen, wrong = set(), []
    adapter = (folder / ADAPTER_WEIGHTS).is_file()
    for own, tensor in checkpoint_tensors(open_store(request.checkpoint), request.name):
        name = name_in_adapter(own) if adapter else own
        if name is None:
            continue
        seen.add(name)
        made = tensor if request.dtype is None else cast_tensor(name, tensor, request.dtype)
        if name not in files or not _equal_bits(_read(files[name], name), made):
            wrong.append(name)
    refuse_wrong_tensors([*wrong, *(files.keys() - seen)], f"checkpoint {request.name}")
    return len(files)


def checkpoint_tensors(store: Store, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors in a checkpoint, each assembled from the pieces of all ranks."""
    index = Index.read(store, name)
    sizes = store.sizes(name)
    heads: dict[str, dict[str, FileEntry]] = {}
    for key, stored in index.tensors.items():
        if not key.startswith(_MODEL):
            continue
        dtype = STORED_DTYPES[stored.dtype]
        whole = torch.empty(stored.shape, dtype=dtype)
        for chunk in stored.pieces():
            if math.prod(chunk.shape) == 0:
                continue
            with store.open(name, chunk.file) as stream:
                if chunk.file not in heads:
                    heads[chunk.file] = read_file_head(stream, sizes[chunk.file])
                entry = heads[chunk.file][chunk.key]
                stream.seek(entry.begin)
                content = bytearray(stream.read(entry.end - entry.begin))
            piece = torch.frombuffer(content, dtype=dtype).reshape(chunk.shape)
            where = zip(chunk.offset, chunk.shape, strict=True)
            whole[tuple(slice(begin, begin + extent) for begin, extent in where)] = piece
        yield key.removeprefix(_MODEL), whole


def compare_logits(request: ExportCheck) -> tuple[float, float]:
    """Compare logits of the merged model and of the run's; return difference and limit."""
    folder = Path(request.folder)
    _refuse_lack_of_memory(folder)
    batch, expected, limit = _logits_of_checkpoint(request)
    if not bool(expected.isfinite().all()):
        raise Unchecked("those of the trained model are not finite")
    auto = getattr(_library("transformers"), class_in_folder(folder).value.auto)
    logits = logits_of(auto.from_pretrained(folder, local_files_only=True), batch)
    difference = largest_difference(logits, expected)
    if not difference <= limit:  # also if it is NaN
        raise MusterError(
            "the export is wrong: the loaded model gives other logits than the trained model",
            why=f"they differ by {difference:.2g} of the largest logit; the limit is {limit:g}",
            fix="check that model/ in the run folder is unchanged, and that transformers has the "
            "version that the run used",
        )
    return difference, limit


def _logits_of_checkpoint(
    request: ExportCheck,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, float]:
    """Build the run's model from the checkpoint's tensors; return inputs, logits and limit."""
    if request.checkpoint is None:
        raise Unchecked("there is no checkpoint to compare with")
    tensors = dict(checkpoint_tensors(open_store(request.checkpoint), request.name))
    recipe = _lora_recipe(request)
    model = recipe.model().value
    if is_quantized(model):
        raise Unchecked("the run's base model is quantized, and the export's is not")
    left = model.load_state_dict(tensors, strict=False)
    without = {name for name, one in model.named_parameters() if one.requires_grad}
    _refuse(
        {
            "missing in the checkpoint": sorted(without & set(left.missing_keys)),
            "not in the run's model": sorted(left.unexpected_keys),
        }
    )
    in_float32 = weights_dtype(model.parameters()) == "float32"
    limit = MERGED if in_float32 and request.dtype in (None, "float32") else SIXTEEN_BITS
    assert recipe.files is not None
    kind = hugging_face.model_class(recipe.files).value
    batch = fixed_batch(hugging_face.model_config(recipe.files), kind)
    return batch, logits_of(model, batch), limit


def _lora_recipe(request: ExportCheck) -> ModelRecipe:
    """Return the run's recipe, with the base model where its adapter finds it."""
    if request.config is None or request.model is None:
        raise Unchecked("the run folder has no settings")
    base = _base(_library("peft").PeftConfig.from_pretrained(request.model))
    settings = resolve_settings(file=Path(request.config)).settings
    model = replace(settings.model, model_name_or_path=base["name"])
    return recipe_of(replace(settings, model=model), _alone())


def _alone() -> World:
    return World(
        global_rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        device=_CPU,
        backend="gloo",
    )


def _adapted(folder: Path, dtype: str) -> Any:
    """Load an adapter on its base model."""
    peft = _library("peft")
    base = _base(peft.PeftConfig.from_pretrained(folder))
    model = _auto_class(base).from_pretrained(
        base["name"], revision=base["revision"], dtype=dtype, local_files_only=True
    )
    return peft.PeftModel.from_pretrained(model, folder)


def _refuse_lack_of_memory(folder: Path) -> None:
    """Raise Unchecked if the model does not fit into free memory; it is loaded once at a time."""
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = round(_MARGIN * size_bytes) + _MARGIN_BYTES
    host = read_cpu()
    if host.total_bytes is None or host.used_bytes is None:
        return
    free = host.total_bytes - host.used_bytes
    if needed > free:
        raise Unchecked(
            f"the model needs about {format_bytes(needed)} of memory, and {format_bytes(free)} are "
            "free on this host"
        )


def _check_model(folder: Path) -> None:
    transformers = _library("transformers")
    # On the meta device no weight is read, only names and shapes; transformers needs accelerate for that.
    place = {"device_map": "meta"} if importlib.util.find_spec("accelerate") else {}
    try:
        _, found = getattr(transformers, class_in_folder(folder).value.auto).from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **place
        )
    except Exception as error:  # any error: the user would see it too
        raise MusterError(
            "the export is invalid: transformers cannot load it",
            why=f"{type(error).__name__}: {_first_line(error)}",
            fix="check that model/ in the run folder is unchanged, and that transformers has the "
            "version "
            "that the run used",
        ) from error
    _refuse(
        {
            "missing": found["missing_keys"],
            "not in the model": found["unexpected_keys"],
            "of another shape": found["mismatched_keys"],
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


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)  # type: ignore[no-any-return]


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same dtype, shape and bits; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unchecked(f"cannot import {name} here: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def main() -> None:
    """Check, and print the result."""
    request = decode_strictly(sys.stdin.buffer.read(), ExportCheck)
    try:
        result = check_export(request)
    except MusterError as error:
        result = CheckResult(what=error.what, why=error.why, fix=error.fix)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
