"""Making the model that is to be trained: a function of the user's, or a folder with a Hugging Face model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face, lora, named
from torchmuster.train.models.hugging_face import ModelFiles
from torchmuster.train.precision import Precision

_SIXTEEN_BITS = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What :func:`torchmuster.train.models.lora.add_lora` is told."""

    rank: int
    alpha: float | None = None
    targets: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
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
                hugging_face.build(self.files, dtype=self.dtype, attention=self.attention)
            )
        assert self.build is not None
        model = named.call(self.build, "model.build")
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
        loaded = hugging_face.load(self.files, dtype=self.dtype, attention=self.attention)
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
        f"the weights are {_names(types)}, as the model has them: small updates are lost; "
        "model.torch_dtype: float32 keeps them"
    )


def with_weights_of(model: nn.Module, chosen: Decision[Precision]) -> Decision[Precision]:
    """Add what weights of fewer bits make of fp32, which changes no type: they decide themselves."""
    types = {one.dtype for one in model.parameters()} & _SIXTEEN_BITS
    if not types or chosen.value.compute is not torch.float32:
        return chosen
    more = f"; the weights are {_names(types)}, and what is computed with them is so too"
    return replace(chosen, reason=chosen.reason + more)


def _names(types: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(one).removeprefix("torch.") for one in types))
