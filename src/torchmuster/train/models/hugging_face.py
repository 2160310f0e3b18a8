"""Hugging Face models: found by folder or name, built or loaded with transformers."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.model_class import (
    ModelClass,
    architecture_of,
    choose_model_class,
    read_config,
    set_dtype,
)
from torchmuster.config.here import looks_like_path
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models import packing

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
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise Impossible(
            f"{folder} has no config.json, so it is not a Hugging Face model",
            why=f"it has {names}",
            fix="give the folder that save_pretrained wrote, or build the model yourself: model.build",
        )
    return ModelFiles(folder=folder, weights=_weights_in(folder), name=name, revision=revision)


def model_class(files: ModelFiles, labels: Sequence[str] | None = None) -> Decision[ModelClass]:
    """Choose the class of a model; with ``labels``, the classes of images, an image classifier."""
    return choose_model_class(read_config(files.folder), images=labels is not None)


def new_head(files: ModelFiles, labels: Sequence[str] | None) -> str:
    """Return why the model gets a new head for these classes; "" if it keeps the one it has."""
    if labels is None or not files.weights:
        return ""
    config = read_config(files.folder)
    named = architecture_of(config)
    if not named.endswith("ForImageClassification"):
        return f"{named or 'the model'} in config.json has no head for classes of images"
    count = len(_own_labels(config))
    if count != len(labels):
        return f"its head has {count} classes, and the data have {len(labels)}"
    return ""


def _own_labels(config: dict[str, Any]) -> list[str]:
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2))]


def build_model(
    files: ModelFiles,
    *,
    dtype: str = "auto",
    labels: Sequence[str] | None = None,
) -> nn.Module:
    """Build the model from its config.json alone, with initial weights."""
    kind = model_class(files, labels).value
    config = model_config(files, labels)
    try:
        model = getattr(_transformers(), kind.auto).from_config(
            config, dtype=_dtype_named(dtype, config)
        )
    except ValueError as error:
        raise _cannot_build(files, error) from error
    return _for_training(model)


def mixed_documents_of(files: ModelFiles) -> str | None:
    """Return why this architecture cannot be trained on packed rows; None if it can.

    A small model of it is tried.
    """
    kind = model_class(files).value
    try:
        config = packing.smaller(model_config(files))
        with torch.random.fork_rng(devices=[]):
            model = getattr(_transformers(), kind.auto).from_config(config, dtype=torch.float32)
    except Exception as error:  # configs of architectures raise errors of their own
        return f"no small model could be built to try it: {error}"
    return packing.mixed_documents(model, config.vocab_size)


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "auto",
    labels: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the full model with the weights of its folder, on the CPU.

    With ``labels`` it classifies images. A head for other classes is replaced by a new one, with
    random weights from torch's generator. ``options`` are further arguments of ``from_pretrained``.
    """
    kind = model_class(files, labels).value
    config = model_config(files, labels)
    replaced = bool(new_head(files, labels))
    transformers = _transformers()
    transformers.logging.disable_progress_bar()  # a rank's output goes to a log
    verbosity = transformers.logging.get_verbosity()
    if replaced:  # Muster reports the new head itself
        transformers.logging.set_verbosity_error()
    try:
        model, loading = getattr(transformers, kind.auto).from_pretrained(
            files.folder,
            config=config,
            dtype=_dtype_named(dtype, config),
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=replaced,
            output_loading_info=True,
            **(options or {}),
        )
    except (ValueError, OSError) as error:
        raise _cannot_build(files, error) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if replaced:
        inner = f"{model.base_model_prefix}."
        missing = {name for name in missing if name.startswith(inner)}
    _refuse_missing(files, missing)
    return _for_training(model)


def _refuse_missing(files: ModelFiles, missing: Iterable[str]) -> None:
    """Reject weights that do not match the model: transformers would randomize missing ones."""
    names = sorted(missing)
    if names:
        raise Impossible(
            f"the weights in {files.folder} do not match its config.json",
            why=f"{len(names)} are not in the files: {', '.join(names[:10])}",
            fix="copy or download the folder again; to train new weights, remove the weight files "
            "from it",
        )


def save_configs(
    files: ModelFiles, folder: Path, model: nn.Module, *, labels: Sequence[str] | None = None
) -> None:
    """Copy a model's config files: all files except weights and tokenizer.

    config.json gets the class and the dtype of the model, and the classes of images.
    """
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
    config = read_config(files.folder)
    architecture = _architecture(model)
    if architecture is not None:
        config["architectures"] = [architecture]
    if labels is not None:
        config.pop("num_labels", None)
        config["id2label"] = {str(number): name for number, name in enumerate(labels)}
        config["label2id"] = {name: number for number, name in enumerate(labels)}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / utils.CONFIG_NAME).write_text(text, encoding="utf-8")
    set_dtype(folder, weights_dtype(model.parameters()))


def weights_dtype(tensors: Iterable[torch.Tensor]) -> str:
    """Return the floating-point dtype that has the most elements."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    return str(most).removeprefix("torch.")


def _architecture(model: nn.Module) -> str | None:
    """Return the name of the transformers class of a model, through any wrappers."""
    from torch.distributed.fsdp import FSDPModule

    whole = _transformers().PreTrainedModel
    for module in model.modules():
        if isinstance(module, whole):
            # fully_shard puts a class of its own in front of the model's.
            kinds = [kind for kind in type(module).__mro__ if issubclass(kind, whole)]
            return next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))
    return None


def load_image_processor(files: ModelFiles) -> Any:
    """Load the image processor in a model's folder."""
    try:
        return _transformers().AutoImageProcessor.from_pretrained(
            files.folder, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise Impossible(
            f"cannot load the image processor in {files.folder}",
            why=str(error).splitlines()[0],
            fix="copy preprocessor_config.json from the model's page on the hub into the folder; Pillow "
            "is needed: pip install 'torchmuster[images]'",
        ) from error


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

    files = {}
    declared = tokenizer.vocab_files_names.values()
    for name in (*declared, ADDED_TOKENS_FILE, SPECIAL_TOKENS_MAP_FILE):
        with contextlib.suppress(OSError):
            files[name] = Path(cached_file(tokenizer.name_or_path, name, local_files_only=True))
    for source in {path.parent for path in files.values()}:
        for kind in _VOCABULARIES:
            files.update((path.name, path) for path in source.glob(kind) if path.is_file())
    return files


def _for_training(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # a cache is for generating
    return model.train()


def model_config(files: ModelFiles, labels: Sequence[str] | None = None) -> Any:
    """Return a model's config as transformers reads it, with ``labels`` as its classes."""
    classes: dict[str, Any] = {}
    if labels is not None:
        classes["id2label"] = dict(enumerate(labels))
        classes["label2id"] = {name: number for number, name in enumerate(labels)}
    try:
        return _transformers().AutoConfig.from_pretrained(
            files.folder, local_files_only=True, **classes
        )
    except (ValueError, OSError, KeyError) as error:
        raise _cannot_build(files, error) from error


def _dtype_named(name: str, config: Any) -> torch.dtype:
    return DTYPES.get(name, config.dtype or torch.float32)


def _cannot_build(files: ModelFiles, error: Exception) -> Impossible:
    kind = read_config(files.folder).get("model_type")
    return Impossible(
        f"transformers cannot build the model from {files.folder / 'config.json'}",
        why=f"its model_type is {kind!r}; {str(error).splitlines()[0]}",
        fix="check config.json, or build the model yourself: model.build (module:function); "
        "Muster does not run code from a model's folder",
    )


def _weights_in(folder: Path) -> tuple[Path, ...]:
    weights = tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not weights:
        raise Impossible(
            f"the weights in {folder} are pickles ({pickles[0].name}), which can run code when loaded",
            why="Muster loads only safetensors files",
            fix="if you trust them, convert them: model.save_pretrained(folder)",
        )
    return weights


def _fetch(name: str) -> Path:
    _transformers()
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
    except (OSError, errors.HFValidationError) as error:
        raise Impossible(
            f"{name!r} is not a folder here, and cannot be downloaded from the hub",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="check the name; private and restricted models need: hf auth login; without network, "
            f"on another host: hf download {name} --local-dir FOLDER; then set "
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
