"""Create the model to train, from a user function or a folder with a Hugging Face model."""

import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face, lora, packing
from torchmuster.train.models.hugging_face import ModelFiles
from torchmuster.train.models.parameters import peft_config


def find_import(name: str, setting: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the working folder is searched first."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Callable[..., Any] = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise Impossible(
            f"{setting} is {name!r}, which cannot be imported",
            why=f"{error}; searched in {folder} and in what is installed for {sys.executable}",
            fix="write module:function, and run from the folder that contains the module",
        ) from error
    return found


def call_import(name: str, setting: str) -> Any:
    """Call the function that ``module:function`` names, without arguments."""
    function = find_import(name, setting)
    try:
        return function()
    except Exception as error:  # the user's own error keeps its traceback
        error.add_note(f"{setting} is {name}: it is called without arguments when the run starts")
        raise


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A Hugging Face model (``files``), or a user function (``build``)."""

    files: ModelFiles | None = None
    build: str | None = None  # module:function
    dtype: str = "auto"  # of the weights; auto: from the files or the function
    lora: Mapping[str, Any] | None = field(default=None, hash=False)  # options of peft.LoraConfig
    load_in_4bit: bool = False  # the frozen weights of files; the others keep dtype
    compute: torch.dtype = torch.float32  # of the layers in 4 bits
    device: str = "cpu"  # that weights in 4 bits are loaded to
    labels: tuple[str, ...] | None = None  # the classes of images, if it classifies them

    @property
    def usual_loss(self) -> str:
        """The loss if model.loss is not set: that of the model's class."""
        if self.files is None:
            return "cross_entropy"
        return hugging_face.model_class(self.files, self.labels).value.loss

    def reasons(self) -> list[str]:
        """Return why the model has its class, and what happens to its head."""
        if self.files is None:
            return []
        lines = [hugging_face.model_class(self.files, self.labels).reason]
        replaced = hugging_face.new_head(self.files, self.labels)
        if replaced:
            lines.append(f"the model gets a new head, random from train.seed: {replaced}")
        return lines

    def sketch(self) -> nn.Module:
        """Create the model with initial weights, and LoRA added."""
        if self.files is not None:
            return self._adapted(
                hugging_face.build_model(self.files, dtype=self.dtype, labels=self.labels)
            )
        model = call_import(str(self.build), "model.build")
        if not isinstance(model, nn.Module):
            raise Impossible(
                f"{self.build} (model.build) returned {type(model).__name__}, which is not a model",
                fix="return a torch.nn.Module",
            )
        if self.dtype != "auto":
            model = model.to(hugging_face.DTYPES[self.dtype])
        return self._adapted(model)

    def model(self) -> nn.Module:
        """Create the model, with the weights of its files if it has any."""
        if self.files is None or not self.files.weights:
            return self.sketch()
        options = lora.four_bit_options(self.compute, self.device) if self.load_in_4bit else {}
        loaded = hugging_face.load_model(
            self.files, dtype=self.dtype, labels=self.labels, options=options
        )
        lora.keep_training_kernels(loaded)
        return self._adapted(loaded)

    def mixed_documents(self, vocabulary: int) -> str | None:
        """Return why the model cannot be trained on packed rows of text; None if it can."""
        if self.files is not None:
            return hugging_face.mixed_documents_of(self.files)
        with torch.random.fork_rng(devices=[]):
            model = call_import(str(self.build), "model.build")
        return packing.mixed_documents(model, vocabulary)

    def check(self) -> None:
        """Reject adapters for a model that has no weights, or none for its head."""
        if self.lora is None or self.files is None:
            return
        problem = hugging_face.new_head(self.files, self.labels)
        if not self.files.weights:
            problem = f"{self.files.folder} has only config.json"
        if problem:
            raise Impossible(
                "LoRA was requested for a model whose frozen weights would be random",
                why=f"{problem}; an adapter does not contain frozen weights",
                fix="set a folder with all weights, or remove model.lora",
            )

    def _adapted(self, model: nn.Module) -> nn.Module:
        if self.lora is None:
            return model
        adapted = lora.add_lora(model, **self.lora)
        if self.files is not None:  # where an adapter finds its base model, from any folder
            config = peft_config(adapted)
            config.base_model_name_or_path = self.files.name
            config.revision = self.files.revision
        return adapted


def check_tokens(config: Any, *, vocabulary: int | None, sequence_length: int) -> None:
    """Reject token ids and rows beyond the limits of a transformers config.

    A GPU reports them as assertions. Other models have None as their config.
    """
    known = getattr(config, "vocab_size", None)
    if known is not None and vocabulary is not None and vocabulary > known:
        raise Impossible(
            f"the tokenizer has {vocabulary} tokens, but the model has only {known}",
            why="a token beyond them has no embedding",
            fix="use the model's own tokenizer, or a larger vocab_size",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise Impossible(
            f"data.sequence_length is {sequence_length}, but the model has {longest} positions",
            why=f"max_position_embeddings in its config.json is {longest}",
            fix=f"--set data.sequence_length={longest}",
        )
