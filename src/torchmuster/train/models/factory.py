"""Create the model to train, from a user function or a folder with a Hugging Face model."""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face, lora, packing
from torchmuster.train.models.hugging_face import ModelFiles
from torchmuster.train.models.parameters import peft_config
from torchmuster.train.precision import Precision

_SIXTEEN_BITS = {torch.bfloat16, torch.float16}


def find_import(name: str, setting: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the working folder is searched first."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise Impossible(
            f"{setting} is {name!r}, which cannot be imported",
            why=f"{error}; searched in {folder} and in what is installed for {sys.executable}",
            fix="write module:function, and run from the folder that contains the module",
        ) from error
    except Exception as error:  # the user's own error keeps its traceback
        error.add_note(f"{setting} is {name}: importing its module failed")
        raise
    if not callable(found):
        raise Impossible(
            f"{setting} is {name!r}, which is not a function but {type(found).__name__}",
            why="it is called when the run starts",
            fix="write module:function",
        )
    return found  # type: ignore[no-any-return]


def call_import(name: str, setting: str) -> Any:
    """Call the function that ``module:function`` names, without arguments; reject None."""
    function = find_import(name, setting)
    try:
        result = function()
    except Exception as error:  # the user's own error keeps its traceback
        error.add_note(f"{setting} is {name}: it is called without arguments when the run starts")
        raise
    if result is None:
        raise Impossible(
            f"{name} ({setting}) returned None",
            why="its return value is used",
            fix=f"end {name.partition(':')[2]} with: return …",
        )
    return result


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
        chosen = hugging_face.model_class(self.files, self.labels)
        replaced = hugging_face.new_head(self.files, self.labels)
        if not replaced:
            return [chosen.reason]
        return [chosen.reason, f"the model gets a new head, random from train.seed: {replaced}"]

    def sketch(self) -> Decision[nn.Module]:
        """Create the model with initial weights; the reason says where LoRA is added."""
        if self.files is not None:
            return self._adapted(
                hugging_face.build_model(self.files, dtype=self.dtype, labels=self.labels)
            )
        assert self.build is not None
        model = call_import(self.build, "model.build")
        if not isinstance(model, nn.Module):
            raise Impossible(
                f"{self.build} (model.build) returned {type(model).__name__}, which is not a model",
                why="a model is a torch.nn.Module",
                fix="return the module itself",
            )
        if self.dtype != "auto":
            model = model.to(hugging_face.DTYPES[self.dtype])
        return self._adapted(model)

    def model(self) -> Decision[nn.Module]:
        """Create the model, with the weights of its files if it has any."""
        if self.files is None or not self.files.weights:
            return self.sketch()
        options = lora.four_bit_options(self.compute, self.device) if self.load_in_4bit else {}
        loaded = hugging_face.load_model(
            self.files,
            dtype=self.dtype,
            labels=self.labels,
            options=options,
        )
        lora.keep_training_kernels(loaded)
        return self._adapted(loaded)

    def mixed_documents(self, vocabulary: int) -> str | None:
        """Return why the model cannot be trained on packed rows of text; None if it can."""
        if self.files is not None:
            return hugging_face.mixed_documents_of(self.files)
        assert self.build is not None
        with torch.random.fork_rng(devices=[]):
            model = call_import(self.build, "model.build")
        return packing.mixed_documents(model, vocabulary)

    def check(self) -> None:
        """Reject adapters for a model that has no weights, or none for its head."""
        if self.lora is not None and self.files is not None and not self.files.weights:
            raise Impossible(
                f"LoRA was requested, but {self.files.folder} has no weights",
                why="it has only config.json, and random weights are not saved",
                fix="set a folder with weights, or remove model.lora",
            )
        if self.lora is not None and self.files is not None:
            replaced = hugging_face.new_head(self.files, self.labels)
            if replaced:
                raise Impossible(
                    "LoRA was requested for a model that gets a new head",
                    why=f"{replaced}; LoRA would freeze the random weights of the new head, and an "
                    "adapter does not contain them",
                    fix="remove model.lora, or train a head first and set its folder here",
                )

    def _adapted(self, model: nn.Module) -> Decision[nn.Module]:
        if self.lora is None:
            return Decision(value=model, reason="")
        adapted = lora.add_lora(model, **self.lora)
        if self.files is not None:  # where an adapter finds its base model, from any folder
            config = peft_config(adapted.value)
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


def lost_updates(model: nn.Module) -> str:
    """Return a warning about 16-bit weights that were not requested; None if there are none."""
    types = {
        parameter.dtype for parameter in model.parameters() if parameter.requires_grad
    } & _SIXTEEN_BITS
    if not types:
        return ""
    return (
        f"the weights are {_dtype_names(types)}, the model's dtype: small updates are lost; "
        "model.torch_dtype: float32 keeps them"
    )


def with_weights_of(model: nn.Module, chosen: Decision[Precision]) -> Decision[Precision]:
    """Add a note to precision fp32 if weights have fewer bits: they then determine the dtype."""
    types = {parameter.dtype for parameter in model.parameters()} & _SIXTEEN_BITS
    if not types or chosen.value.compute is not torch.float32:
        return chosen
    more = f"; the weights are {_dtype_names(types)}, and so is the computation with them"
    return replace(chosen, reason=chosen.reason + more)


def _dtype_names(types: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
