"""Language models of the Hugging Face kind: found by folder or name, built or loaded with transformers."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.config.here import looks_like_path
from torchmuster.errors import Impossible

INSTALL = "pip install 'torchmuster[transformers]'"
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Nothing else of a model's repository is fetched: no code, and no weights that are pickles.
_FETCHED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's folder: how it is built, and its weights if it has any."""

    folder: Path
    weights: tuple[Path, ...]  # safetensors; none where the folder has only config.json


def find(name_or_path: str) -> ModelFiles:
    """Find a model: a local folder, or a name on the hub, which is fetched unless it is here already."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        if looks_like_path(name_or_path):
            raise Impossible(
                f"there is no folder {name_or_path!r} with a model",
                why=f"looked for it in {Path.cwd()}",
                fix="check the path; a name on the hub is written as owner/name",
            )
        folder = _fetch(name_or_path)
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(one.name for one in folder.iterdir())[:10]) or "nothing"
        raise Impossible(
            f"{folder} has no config.json, so it is not a model of the Hugging Face kind",
            why=f"it has {names}",
            fix="give the folder that save_pretrained wrote, or build the model yourself: model.build",
        )
    return ModelFiles(folder=folder, weights=_weights(folder))


def build(files: ModelFiles, *, dtype: str = "auto", attention: str = "sdpa") -> nn.Module:
    """Build the model from its config.json alone; its weights are those of a new model."""
    config = _config(files)
    try:
        model = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=_dtype(dtype, config), attn_implementation=attention
        )
    except ValueError as error:
        raise _cannot_build(files, error) from error
    return _for_training(model)


def load(files: ModelFiles, *, dtype: str = "auto", attention: str = "sdpa") -> nn.Module:
    """Return the model with the weights of its folder, whole, on the CPU."""
    config = _config(files)
    try:
        model = _transformers().AutoModelForCausalLM.from_pretrained(
            files.folder,
            dtype=_dtype(dtype, config),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
        )
    except ValueError as error:
        raise _cannot_build(files, error) from error
    return _for_training(model)


def save_beside(files: ModelFiles, folder: Path) -> None:
    """Put what belongs to a model beside its weights: config.json and the tokenizer's files."""
    for source in sorted(files.folder.iterdir()):
        belongs = source.name.startswith(("config.json", "generation_config", "tokenizer"))
        if belongs or source.name in ("special_tokens_map.json", "vocab.json", "merges.txt"):
            (folder / source.name).write_bytes(source.read_bytes())


def _for_training(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # a cache is for generating
    return model.train()


def _config(files: ModelFiles) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(files.folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise _cannot_build(files, error) from error


def _dtype(name: str, config: Any) -> torch.dtype:
    return DTYPES.get(name, config.dtype or torch.float32)


def _cannot_build(files: ModelFiles, error: Exception) -> Impossible:
    kind = "unknown"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        kind = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    return Impossible(
        f"transformers cannot build a language model from {files.folder / 'config.json'}",
        why=f"its model_type is {kind!r}; {str(error).splitlines()[0]}",
        fix="check config.json, or build the model yourself: model.build (module:function); code that "
        "comes with a model is not run",
    )


def _weights(folder: Path) -> tuple[Path, ...]:
    found = tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not found:
        raise Impossible(
            f"the weights in {folder} are pickles ({pickles[0].name}), which can run code when loaded",
            why="only safetensors are read",
            fix="convert them where you trust them: model.save_pretrained(folder)",
        )
    if (folder / "model.safetensors.index.json").is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = set(index["weight_map"].values())
        missing = sorted(named - {one.name for one in found})
        if missing:
            raise Impossible(
                f"weights are missing in {folder}: {', '.join(missing[:5])}",
                why=f"model.safetensors.index.json names {len(named)} files",
                fix="copy or fetch them again",
            )
        return tuple(one for one in found if one.name in named)
    return found


def _fetch(name: str) -> Path:
    _transformers()
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
    except errors.GatedRepoError as error:
        raise Impossible(
            f"{name!r} may be fetched from the hub only by those who were let in",
            why="its owner asks for agreement, and the hub did not recognise you",
            fix=f"agree at https://huggingface.co/{name}, then: hf auth login",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise Impossible(
            f"there is neither a folder {name!r} here nor a model of that name on the hub",
            why=f"looked in {Path.cwd()} and at https://huggingface.co/{name}",
            fix="check the name; a private model needs: hf auth login",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise Impossible(
            f"{name!r} is not a folder here, and the hub cannot be reached to fetch it",
            why="it has not been fetched before, or is incomplete; "
            f"{(str(error).splitlines() or [''])[0]}",
            fix=f"on a machine with a network: hf download {name} --local-dir FOLDER; then give "
            "model.model_name_or_path: FOLDER",
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Impossible(
            "models by name or folder need transformers, which is not installed",
            why=str(error),
            fix=INSTALL,
        ) from error
    return transformers
