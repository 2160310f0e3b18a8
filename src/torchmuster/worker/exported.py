"""Check exported weights with the library that will load them, in a separate process.

``python -m torchmuster.worker.exported`` reads an :class:`~torchmuster.checkpoints.export_check.ExportCheck`
from standard input and prints a :class:`~torchmuster.checkpoints.export_check.CheckResult`. It makes
these checks:

1. transformers, or peft, finds exactly its weights in the folder: no name is missing, unexpected or
   of another shape.
2. A merged model, loaded from the folder, gives the same logits as the adapter on its base model.
   (Without a merge, the export itself has compared every byte with the checkpoint.)
"""

import importlib
import importlib.util
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from torchmuster.checkpoints.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from torchmuster.checkpoints.export_check import MERGED, SIXTEEN_BITS, CheckResult, ExportCheck
from torchmuster.checkpoints.model_class import choose_model_class, class_in_folder, set_dtype
from torchmuster.checkpoints.store import decode_strictly
from torchmuster.errors import MusterError
from torchmuster.train.models import hugging_face
from torchmuster.train.models.hugging_face import weights_dtype
from torchmuster.train.models.logits import fixed_batch, largest_difference, logits_of
from torchmuster.train.weights import some_names


class Unchecked(Exception):
    """The reason why something cannot be checked here."""


def check_export(request: ExportCheck) -> CheckResult:
    """Merge the weights if requested, and check them; raise an error if they are wrong."""
    folder = Path(request.folder)
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
            return CheckResult()
        limit = MERGED if request.base_dtype == "float32" else SIXTEEN_BITS
        return CheckResult(difference=compare_logits(folder, expected, limit), limit=limit)
    except Unchecked as error:
        return CheckResult(unchecked=f"names not compared: {error}")


def check_names(folder: Path) -> None:
    """Raise an error unless transformers, or peft, finds exactly its weights in the folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        _check_adapter(folder)
    elif (folder / "config.json").is_file():
        _check_model(folder)
    else:
        raise Unchecked("there is no config.json, so no library can build the model")


def merge(folder: Path, *, dtype: str) -> torch.Tensor:
    """Replace an adapter by the full model, merged into the base model's weights; return its logits.

    The base model is loaded in ``dtype``. The logits are those of the adapter on its base model, before the merge.
    """
    transformers = _library("transformers")
    check_names(folder)
    generation = folder / transformers.utils.GENERATION_CONFIG_NAME
    config_of_base = generation.read_bytes() if generation.is_file() else None
    model = _adapted(folder, dtype)
    expected = logits_of(model, _batch_for(model))
    merged = model.merge_and_unload(safe_merge=True)
    # transformers refuses to save an invalid generation config; keep the base model's file.
    merged.generation_config = transformers.GenerationConfig()
    merged.save_pretrained(folder, max_shard_size="2GB")
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)  # save_pretrained gives mode 600
    if config_of_base is None:
        generation.unlink(missing_ok=True)
    else:
        generation.write_bytes(config_of_base)
    set_dtype(folder, weights_dtype(merged.parameters()))
    (folder / ADAPTER_CONFIG).unlink()
    (folder / ADAPTER_WEIGHTS).unlink()
    return expected


def compare_logits(folder: Path, expected: torch.Tensor, limit: float) -> float:
    """Compare logits of the merged model in a folder with those before the merge; return the difference."""
    if not bool(expected.isfinite().all()):
        raise MusterError(
            "the trained model gives logits that are not finite, so the export cannot be checked",
            fix="export an earlier checkpoint: muster checkpoint list shows them",
        )
    auto = getattr(_library("transformers"), class_in_folder(folder).value.auto)
    model = auto.from_pretrained(folder, local_files_only=True)
    difference = largest_difference(logits_of(model, _batch_for(model)), expected)
    if not difference <= limit:  # also if it is NaN
        raise MusterError(
            "the export is wrong: the loaded model gives other logits than the trained model",
            why=f"they differ by {difference:.2g} of the largest logit; the limit is {limit:g}",
            fix="check that model/ in the run folder is unchanged, and that transformers has the "
            "version that the run used",
        )
    return difference


def _batch_for(model: Any) -> dict[str, torch.Tensor]:
    return fixed_batch(model.config, choose_model_class(model.config.to_dict()).value)


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
            why=f"{type(error).__name__}: {_first_line(error)}",
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
