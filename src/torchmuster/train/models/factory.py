"""Making the model that is to be trained: a function of the user's, or a folder with a Hugging Face model."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face, lora
from torchmuster.train.models.hugging_face import ModelFiles
from torchmuster.train.precision import Precision


def find_import(name: str, setting: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the working folder is looked in first."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise Impossible(
            f"{setting} is {name!r}, which is not module:function",
            why="it names a function of yours: the module with dots, a colon, the function",
            fix=f"{setting}: my_project.{setting.rpartition('.')[2]}:make",
        )
    module = _module(module_name, name, setting)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [one for one, value in vars(module).items() if _is_own(value, module_name)]
            raise Impossible(
                f"{setting} is {name!r}, but {module_name} has no {attribute!r}",
                why=f"{module.__file__} defines: {', '.join(known) or 'no functions'}",
                fix="check the name after the colon",
            )
        found = getattr(found, part)
    if not callable(found):
        raise Impossible(
            f"{setting} is {name!r}, which is no function but {type(found).__name__}",
            why="it is called without arguments when the run starts",
            fix=f"def {attribute}(): return …",
        )
    return found  # type: ignore[no-any-return]


def call_import(name: str, setting: str) -> Any:
    """Call the function that ``module:function`` names, without arguments; None is no answer."""
    function = find_import(name, setting)
    needed = _needed(function)
    if needed:
        raise Impossible(
            f"{name} ({setting}) needs arguments: {', '.join(needed)}",
            why="it is called without arguments when the run starts",
            fix="give them defaults, or name a function without arguments that calls it",
        )
    try:
        made = function()
    except Exception as error:  # the user's own error keeps its traceback, and says who called
        error.add_note(f"{setting} is {name}: it is called without arguments when the run starts")
        raise
    if made is None:
        raise Impossible(
            f"{name} ({setting}) returned None",
            why="what it returns is what is used",
            fix=f"end {name.partition(':')[2]} with: return …",
        )
    return made


def _module(module_name: str, name: str, setting: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            error.add_note(_while_importing(name, setting))  # what *it* imports is missing
            raise
        raise Impossible(
            f"{setting} is {name!r}, but there is no module {error.name!r}",
            why=f"it is neither in {folder} nor installed for {sys.executable}",
            fix="run from the folder that has it; a module is written with dots and without .py",
        ) from error
    except Exception as error:
        error.add_note(_while_importing(name, setting))
        raise


def _while_importing(name: str, setting: str) -> str:
    return f"{setting} is {name}: its module was found, and failed while Python ran it"


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty and one.kind not in optional
    ]


def _is_own(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


_SIXTEEN_BITS = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What :func:`torchmuster.train.models.lora.add_lora` is told."""

    rank: int
    alpha: float | None = None
    targets: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A model of the Hugging Face kind (``files``), or a function of the user's (``build``)."""

    files: ModelFiles | None = None
    build: str | None = None  # module:function
    dtype: str = "auto"  # of the weights; auto: as the files or the function have it
    attention: str = "sdpa"
    lora: Lora | None = None

    def sketch(self) -> Decision[nn.Module]:
        """Make the model, with the weights of a new model; the reason says where LoRA is added."""
        if self.files is not None:
            return self._adapted(
                hugging_face.build_model(self.files, dtype=self.dtype, attention=self.attention)
            )
        assert self.build is not None
        model = call_import(self.build, "model.build")
        if not isinstance(model, nn.Module):
            raise Impossible(
                f"{self.build} (model.build) returned {type(model).__name__}, which is no model",
                why="a model is a torch.nn.Module",
                fix="return the module itself",
            )
        if self.dtype != "auto":
            model = model.to(hugging_face.DTYPES[self.dtype])
        return self._adapted(model)

    def model(self) -> Decision[nn.Module]:
        """Make the model, with the weights of its files if it has some."""
        if self.files is None or not self.files.weights:
            return self.sketch()
        loaded = hugging_face.load_model(self.files, dtype=self.dtype, attention=self.attention)
        return self._adapted(loaded)

    def check(self) -> None:
        """Refuse adapters for a model that has no weights."""
        if self.lora is not None and self.files is not None and not self.files.weights:
            raise Impossible(
                f"LoRA was asked for, but {self.files.folder} has no weights to put it beside",
                why="it has only config.json, and weights drawn at random are not kept",
                fix="give a folder with weights, or leave out model.lora_rank",
            )

    def _adapted(self, model: nn.Module) -> Decision[nn.Module]:
        if self.lora is None:
            return Decision(value=model, reason="")
        adapted = lora.add_lora(
            model, rank=self.lora.rank, alpha=self.lora.alpha, targets=self.lora.targets
        )
        if self.files is not None:  # where an adapter finds its base model, from any folder
            config = lora.peft_config(adapted.value)
            config.base_model_name_or_path = self.files.name
            config.revision = self.files.revision
        return adapted


def check_tokens(model: nn.Module, *, vocabulary: int | None, sequence_length: int) -> None:
    """Refuse tokens and rows that a model has no place for; on a GPU they would end in an assertion."""
    config = getattr(model, "config", None)
    known = getattr(config, "vocab_size", None)
    if known is not None and vocabulary is not None and vocabulary > known:
        raise Impossible(
            f"the tokenizer has {vocabulary} tokens, but the model knows only {known}",
            why="a token beyond them has no embedding",
            fix="give the model's own tokenizer, or a vocab_size that has room for all",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise Impossible(
            f"data.sequence_length is {sequence_length}, but the model has {longest} positions",
            why="max_position_embeddings in its config.json",
            fix=f"--set data.sequence_length={longest}",
        )


def lost_updates(model: nn.Module) -> str:
    """Say what becomes of 16-bit weights that nobody asked for; nothing if there are none."""
    types = {one.dtype for one in model.parameters() if one.requires_grad} & _SIXTEEN_BITS
    if not types:
        return ""
    return (
        f"the weights are {_factory_names(types)}, as the model has them: small updates are lost; "
        "model.torch_dtype: float32 keeps them"
    )


def with_weights_of(model: nn.Module, chosen: Decision[Precision]) -> Decision[Precision]:
    """Add what weights of fewer bits make of fp32, which changes no type: they decide themselves."""
    types = {one.dtype for one in model.parameters()} & _SIXTEEN_BITS
    if not types or chosen.value.compute is not torch.float32:
        return chosen
    more = f"; the weights are {_factory_names(types)}, and what is computed with them is so too"
    return replace(chosen, reason=chosen.reason + more)


def _factory_names(types: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(one).removeprefix("torch.") for one in types))
