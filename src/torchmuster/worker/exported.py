"""Check exported weights with the library that will load them, in a separate process.

``python -m torchmuster.worker.exported FOLDER [--merge --dtype float32]`` prints one line of JSON:
``{}`` if the folder loads without a missing or unexpected weight, ``{"unchecked": reason}`` if that
cannot be checked here, else the error's ``what``, ``why`` and ``fix``.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchmuster.checkpoints.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from torchmuster.errors import MusterError

_SHOWN = 5  # names in an error


class Unchecked(Exception):
    """The reason why a folder cannot be checked here."""


def check(folder: Path) -> None:
    """Raise an error unless transformers, or peft, finds exactly its weights in the folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        _check_adapter(folder)
    else:
        _check_model(folder)


def merge(folder: Path, *, dtype: str) -> None:
    """Replace an adapter by the full model, merged into the base model's weights."""
    peft, transformers = _library("peft"), _library("transformers")
    config = peft.PeftConfig.from_pretrained(folder)
    base = _base(config)
    generation = folder / transformers.utils.GENERATION_CONFIG_NAME
    kept = generation.read_bytes() if generation.is_file() else None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base["name"], revision=base["revision"], dtype=dtype, local_files_only=True
    )
    merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True)
    # transformers refuses to save an invalid generation config; keep the base model's file.
    merged.generation_config = transformers.GenerationConfig()
    merged.save_pretrained(folder, max_shard_size="2GB")
    if kept is None:
        generation.unlink(missing_ok=True)
    else:
        generation.write_bytes(kept)
    (folder / ADAPTER_CONFIG).unlink()
    (folder / ADAPTER_WEIGHTS).unlink()


def _check_model(folder: Path) -> None:
    transformers = _library("transformers")
    # On the meta device no weight is read, only names and shapes; transformers needs accelerate for that.
    place = {"device_map": "meta"} if importlib.util.find_spec("accelerate") else {}
    try:
        _, found = transformers.AutoModelForCausalLM.from_pretrained(
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
    from safetensors import safe_open

    config = peft.PeftConfig.from_pretrained(folder)
    base = _base(config)
    described = transformers.AutoConfig.from_pretrained(
        base["name"], revision=base["revision"], local_files_only=True
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
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
    lines = [f"{kind}: {_some(names)}" for kind, names in wrong.items() if names]
    if lines:
        raise MusterError(
            "the export is invalid: its weights do not match the config next to them",
            why="\n".join(lines),
            fix="check that model/ in the run folder is unchanged",
        )


def _some(names: Sequence[Any]) -> str:
    shown = ", ".join(sorted(map(str, names))[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unchecked(f"cannot import {name} here: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def main(words: Sequence[str] | None = None) -> None:
    """Check, or merge and check, and print the result."""
    parser = argparse.ArgumentParser(prog="torchmuster.worker.exported", allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(words)
    answer: dict[str, str] = {}
    try:
        if options.merge:
            merge(options.folder, dtype=options.dtype)
        check(options.folder)
    except Unchecked as error:
        answer = {"unchecked": str(error)}
    except MusterError as error:
        answer = {"what": error.what, "why": error.why, "fix": error.fix}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
