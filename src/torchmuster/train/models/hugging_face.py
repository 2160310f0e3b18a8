"""Hugging Face models: found by folder or name, built or loaded with transformers."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
)
from torchmuster.config.here import looks_like_path
from torchmuster.decision import Decision
from torchmuster.errors import Impossible, first_line
from torchmuster.train.models import packing

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Nothing else of a model's repository is downloaded: no code, and no pickled weights.
_FETCHED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# Files of a model that are copied as they are.
_COPIED = ("generation_config.json", "processor_config.json", "preprocessor_config.json")
_FROM_THE_HUB = (
    "check the name; private and restricted models need: hf auth login; without network, on another "
    "host: hf download {name} --local-dir FOLDER; then give FOLDER instead of the name"
)


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's folder: its config, and its weights if it has any."""

    folder: Path
    weights: tuple[Path, ...]  # safetensors; empty if the folder has only config.json
    name: str  # for other programs: an absolute path, or a name on the hub
    revision: str | None = None  # of a model on the hub


@contextmanager
def loading(what: str, fix: str) -> Iterator[None]:
    """Raise the errors of transformers and of the hub with their first line and a fix."""
    try:
        yield
    except ImportError as error:
        raise Impossible(
            f"cannot load {what}", why=str(error), fix="pip install 'torchmuster[transformers]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise Impossible(f"cannot load {what}", why=first_line(error), fix=fix) from error


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
        with loading(f"the model {name_or_path!r}", _FROM_THE_HUB.format(name=name_or_path)):
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name_or_path, allow_patterns=list(_FETCHED)))
        name, revision = name_or_path, folder.name
    if not (folder / "config.json").is_file():
        raise Impossible(
            f"{folder} has no config.json, so it is not a Hugging Face model",
            fix="give the folder that save_pretrained wrote, or build the model yourself: model.build",
        )
    weights = tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not weights:
        raise Impossible(
            f"the weights in {folder} are pickles ({pickles[0].name}), which can run code when loaded",
            why="Muster loads only safetensors files",
            fix="if you trust them, convert them: model.save_pretrained(folder)",
        )
    return ModelFiles(folder=folder, weights=weights, name=name, revision=revision)


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
    config = model_config(files, labels)
    with _building(files):
        model = _auto_class(files, labels).from_config(config, dtype=_dtype_named(dtype, config))
    return _for_training(model)


def mixed_documents_of(files: ModelFiles) -> str | None:
    """Return why this architecture cannot be trained on packed rows; None if it can.

    A small model of it is tried.
    """
    try:
        config = packing.smaller(model_config(files))
        with torch.random.fork_rng(devices=[]):
            model = _auto_class(files).from_config(config, dtype=torch.float32)
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
    config = model_config(files, labels)
    replaced = bool(new_head(files, labels))
    with _building(files):
        import transformers

        transformers.logging.disable_progress_bar()  # a rank's output goes to a log
        model, report = _auto_class(files, labels).from_pretrained(
            files.folder,
            config=config,
            dtype=_dtype_named(dtype, config),
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=replaced,
            output_loading_info=True,
            **(options or {}),
        )
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if replaced:
        inner = f"{model.base_model_prefix}."
        missing = {name for name in missing if name.startswith(inner)}
    if missing:  # transformers would randomize them
        raise Impossible(
            f"the weights in {files.folder} do not match its config.json",
            why=f"{len(missing)} are not in the files: {', '.join(sorted(missing)[:10])}",
            fix="copy or download the folder again; to train new weights, remove the weight files "
            "from it",
        )
    return _for_training(model)


def save_configs(
    files: ModelFiles, folder: Path, model: nn.Module, *, labels: Sequence[str] | None = None
) -> None:
    """Copy a model's config files: all files except weights and tokenizer.

    config.json gets the class and the dtype of the model, and the classes of images.
    """
    from transformers import PreTrainedModel

    for name in _COPIED:
        if (files.folder / name).is_file():
            shutil.copyfile(files.folder / name, folder / name)
    config = read_config(files.folder)
    config.pop("torch_dtype", None)  # the name of dtype before transformers 5
    config["dtype"] = weights_dtype(model.parameters())
    for module in model.modules():  # through any wrappers
        if isinstance(module, PreTrainedModel):
            # fully_shard puts a class of its own in front of the model's.
            config["architectures"] = [type(module).__name__.removeprefix("FSDP")]
            break
    if labels is not None:
        config.pop("num_labels", None)
        config["id2label"] = {str(number): name for number, name in enumerate(labels)}
        config["label2id"] = {name: number for number, name in enumerate(labels)}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def weights_dtype(tensors: Iterable[torch.Tensor]) -> str:
    """Return the floating-point dtype that has the most elements."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    return str(most).removeprefix("torch.")


def load_image_processor(files: ModelFiles) -> Any:
    """Load the image processor in a model's folder."""
    with loading(
        f"the image processor in {files.folder}",
        "copy preprocessor_config.json from the model's page on the hub into the folder; Pillow is "
        "needed: pip install 'torchmuster[images]'",
    ):
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(files.folder, local_files_only=True)


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from a folder or by its name on the hub."""
    folder = Path(name_or_path).expanduser()
    fix = "set data.tokenizer: bytes, the folder of a tokenizer, or its name on the hub"
    with loading(f"the tokenizer {name_or_path}", fix):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else name_or_path)
    # From a folder without a tokenizer transformers builds one with an empty vocabulary.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise Impossible(
            f"{name_or_path} has no tokenizer", why="its vocabulary would be empty", fix=fix
        )
    return tokenizer


def _for_training(model: nn.Module) -> nn.Module:
    model.config.use_cache = False  # type: ignore[union-attr]  # a cache is for generating
    return model.train()


def model_config(files: ModelFiles, labels: Sequence[str] | None = None) -> Any:
    """Return a model's config as transformers reads it, with ``labels`` as its classes."""
    classes: dict[str, Any] = {}
    if labels is not None:
        classes["id2label"] = dict(enumerate(labels))
        classes["label2id"] = {name: number for number, name in enumerate(labels)}
    with _building(files):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(files.folder, local_files_only=True, **classes)


def _auto_class(files: ModelFiles, labels: Sequence[str] | None = None) -> Any:
    """Return the class of transformers that builds and loads a model."""
    import transformers

    return getattr(transformers, model_class(files, labels).value.auto)


def _dtype_named(name: str, config: Any) -> torch.dtype:
    return DTYPES.get(name, config.dtype or torch.float32)


def _building(files: ModelFiles) -> Any:
    return loading(
        f"the model of {files.folder / 'config.json'}",
        "check config.json, or build the model yourself: model.build (module:function); Muster does "
        "not run code from a model's folder",
    )
