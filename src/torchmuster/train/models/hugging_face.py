"""Hugging Face language models: found by folder or name, built or loaded with transformers."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
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
# Nothing else of a model's repository is downloaded: no code, and no pickled weights.
_FETCHED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# Also tokenizer files that the transformers class does not declare, such as Gemma's
# tokenizer.model.
_VOCABULARIES = (
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "tokenizer*",
    "vocab*",
    "merges*",
    "tekken.json",
)


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's folder: its config, and its weights if it has any."""

    folder: Path
    weights: tuple[Path, ...]  # safetensors; empty if the folder has only config.json
    name: str  # for other programs: an absolute path, or a name on the hub
    revision: str | None = None  # of a model on the hub


def find_model(name_or_path: str) -> ModelFiles:
    """Find a model: a local folder, or a name on the hub, which is downloaded unless cached."""
    folder = Path(name_or_path).expanduser()
    name, revision = str(folder.absolute()), None
    if not folder.is_dir():
        if looks_like_path(name_or_path):
            raise Impossible(
                f"no model folder {name_or_path!r}",
                why=f"searched in {Path.cwd()}",
                fix="check the path; a name on the hub has the form owner/name",
            )
        folder = _fetch(name_or_path)
        name, revision = name_or_path, folder.name
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(one.name for one in folder.iterdir())[:10]) or "nothing"
        raise Impossible(
            f"{folder} has no config.json, so it is not a Hugging Face model",
            why=f"it has {names}",
            fix="give the folder that save_pretrained wrote, or build the model yourself: model.build",
        )
    return ModelFiles(
        folder=folder, weights=_hugging_face_weights(folder), name=name, revision=revision
    )


def build_model(files: ModelFiles, *, dtype: str = "auto", attention: str = "sdpa") -> nn.Module:
    """Build the model from its config.json alone, with initial weights."""
    config = load_config(files)
    try:
        model = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=_hugging_face_dtype(dtype, config), attn_implementation=attention
        )
    except ValueError as error:
        raise _cannot_build(files, error) from error
    return _for_training(model)


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "auto",
    attention: str = "sdpa",
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the full model with the weights of its folder, on the CPU.

    ``options`` are further arguments of ``from_pretrained``.
    """
    config = load_config(files)
    try:
        model, found = _transformers().AutoModelForCausalLM.from_pretrained(
            files.folder,
            dtype=_hugging_face_dtype(dtype, config),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **(options or {}),
        )
    except ValueError as error:
        raise _cannot_build(files, error) from error
    _refuse_missing(files, found["missing_keys"])
    return _for_training(model)


def _refuse_missing(files: ModelFiles, missing: Iterable[str]) -> None:
    """Reject weights that do not match the model: transformers would randomize missing ones."""
    if names := sorted(missing):
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise Impossible(
            f"the weights in {files.folder} do not match its config.json",
            why=f"not in the files: {', '.join(names[:10])}{more}",
            fix="copy or download the folder again; to train new weights, remove the weight files "
            "from it",
        )


def save_configs(files: ModelFiles, folder: Path) -> None:
    """Copy a model's config files: all files except weights and tokenizer."""
    from transformers import utils

    for name in (
        utils.CONFIG_NAME,
        utils.GENERATION_CONFIG_NAME,
        utils.PROCESSOR_NAME,
        utils.IMAGE_PROCESSOR_NAME,
        utils.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    ):
        if (files.folder / name).is_file():
            shutil.copyfile(files.folder / name, folder / name)


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from a folder or by its name on the hub."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise Impossible(
            f"the tokenizer {name_or_path} needs transformers, which is not installed",
            fix="pip install 'torchmuster[transformers]'; or set data.tokenizer: bytes",
        ) from None
    folder = Path(name_or_path).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else name_or_path)
    except (OSError, ValueError, ImportError) as error:
        raise Impossible(
            f"cannot load the tokenizer {name_or_path}",
            why=str(error).splitlines()[0],
            fix="set data.tokenizer to the folder of a tokenizer, or to a name on the hub that this host "
            "can download",
        ) from None
    # From a folder without a tokenizer transformers builds one with an empty vocabulary.
    names = tokenizer.vocab_files_names
    loaded = [value for kind, value in tokenizer.init_kwargs.items() if kind.endswith("_file")]
    if names and not any(loaded) and not _tokenizer_files(tokenizer):
        raise Impossible(
            f"{name_or_path} has no tokenizer",
            why=f"found none of {', '.join(sorted(names.values()))}",
            fix="set data.tokenizer: bytes, the folder of a tokenizer, or its name on the hub",
        )
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer as transformers does, with the vocabulary files that it was loaded from.

    transformers writes tokenizer.json instead of vocab.txt, tokenizer.model and the like, which other programs read.
    """
    tokenizer.save_pretrained(folder)
    for name, path in _tokenizer_files(tokenizer).items():
        if not (folder / name).exists():
            shutil.copyfile(path, folder / name)


def _tokenizer_files(tokenizer: Any) -> dict[str, Path]:
    """Return a tokenizer's declared files and vocabularies, in its folder or the hub's cache."""
    from transformers.tokenization_utils_base import ADDED_TOKENS_FILE, SPECIAL_TOKENS_MAP_FILE
    from transformers.utils import cached_file

    found = {}
    declared = tokenizer.vocab_files_names.values()
    for name in (*declared, ADDED_TOKENS_FILE, SPECIAL_TOKENS_MAP_FILE):
        with contextlib.suppress(OSError):
            found[name] = Path(cached_file(tokenizer.name_or_path, name, local_files_only=True))
    for source in {path.parent for path in found.values()}:
        for kind in _VOCABULARIES:
            found.update((one.name, one) for one in source.glob(kind) if one.is_file())
    return found


def _for_training(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # a cache is for generating
    return model.train()


def load_config(files: ModelFiles) -> Any:
    """Return the config of a model."""
    try:
        return _transformers().AutoConfig.from_pretrained(files.folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise _cannot_build(files, error) from error


def _hugging_face_dtype(name: str, config: Any) -> torch.dtype:
    return DTYPES.get(name, config.dtype or torch.float32)


def _cannot_build(files: ModelFiles, error: Exception) -> Impossible:
    kind = "unknown"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        kind = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    return Impossible(
        f"transformers cannot build a language model from {files.folder / 'config.json'}",
        why=f"its model_type is {kind!r}; {str(error).splitlines()[0]}",
        fix="check config.json, or build the model yourself: model.build (module:function); "
        "Muster does not run code from a model's folder",
    )


def _hugging_face_weights(folder: Path) -> tuple[Path, ...]:
    found = tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not found:
        raise Impossible(
            f"the weights in {folder} are pickles ({pickles[0].name}), which can run code when loaded",
            why="Muster loads only safetensors files",
            fix="if you trust them, convert them: model.save_pretrained(folder)",
        )
    if (folder / "model.safetensors.index.json").is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = set(index["weight_map"].values())
        missing = sorted(named - {one.name for one in found})
        if missing:
            raise Impossible(
                f"weights are missing in {folder}: {', '.join(missing[:5])}",
                why=f"model.safetensors.index.json names {len(named)} files",
                fix="copy or download them again",
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
            f"access to {name!r} on the hub is restricted",
            why="its owner requires you to accept the terms, and you are not logged in or have no "
            "access yet",
            fix=f"accept the terms at https://huggingface.co/{name}, then: hf auth login",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise Impossible(
            f"found neither a folder {name!r} here nor a model of that name on the hub",
            why=f"searched in {Path.cwd()} and at https://huggingface.co/{name}",
            fix="check the name; a private model needs: hf auth login",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise Impossible(
            f"{name!r} is not a folder here, and the hub cannot be reached to download it",
            why=f"it is missing or incomplete in the cache; {(str(error).splitlines() or [''])[0]}",
            fix=f"on a host with network access: hf download {name} --local-dir FOLDER; then set "
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
