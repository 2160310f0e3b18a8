"""Making the model that is to be trained: where it comes from, without memory first, weights from files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models import hugging_face, lora, named
from torchmuster.train.models.deferred import deferred
from torchmuster.train.models.hugging_face import ModelFiles
from torchmuster.train.models.pretrained import load_shards
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

    def without_memory(self, *, may_be_whole: bool) -> Decision[nn.Module]:
        """Make the model without memory for its weights.

        A function of the user's may do what needs real numbers; where ``may_be_whole``, it is then called
        again, and the whole model is made on every rank.
        """
        try:
            with deferred():
                return self._made()
        except Exception:
            if not may_be_whole or self.build is None:
                raise
        return self._made()

    def with_weights(self, model: nn.Module, *, may_be_whole: bool) -> nn.Module:
        """Give a model without memory the weights of its files, which are read when it is spread."""
        if self.files is None or not self.files.weights:
            return model
        rename = lora.name_before if self.lora else _as_it_is
        try:
            load_shards(model, self.files.weights, name_in_files=rename)
        except Impossible:
            if not may_be_whole:
                raise
            # Files of older versions have other names, which transformers knows how to change.
            loaded = hugging_face.load(self.files, dtype=self.dtype, attention=self.attention)
            return self._with_lora(loaded).value
        return model

    def _made(self) -> Decision[nn.Module]:
        if self.files is not None:
            model = hugging_face.build(self.files, dtype=self.dtype, attention=self.attention)
        else:
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
        return self._with_lora(model)

    def _with_lora(self, model: nn.Module) -> Decision[nn.Module]:
        if self.lora is None:
            return Decision(value=model, reason="")
        if self.files is not None and not self.files.weights:
            raise Impossible(
                f"LoRA was asked for, but {self.files.folder} has no weights to put it beside",
                why="it has only config.json, and weights drawn at random are not kept",
                fix="give a folder with weights, or leave out model.lora_rank",
            )
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


def _as_it_is(name: str) -> str | None:
    return name
