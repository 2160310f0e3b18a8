"""Sizes of a transformer's layers from its configuration, without biases and attention norms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.plan.job import Work


def model_configuration(work: Work) -> Mapping[str, Any] | None:
    """Return a model's config.json from its folder or from the hub's cache; None if missing."""
    place = _model_figures_place(work)
    if place is None:
        return None
    return untrusted.read_json_object(place) or None


def weights_dtype(work: Work) -> str:
    """Return the dtype of a model's weights in training (default: float32; auto: the files')."""
    if work.torch_dtype != "auto":
        return work.torch_dtype or "float32"
    told = model_configuration(work) or {}
    return str(told.get("dtype") or told.get("torch_dtype") or "float32")


def _model_figures_place(work: Work) -> Path | None:
    name = work.model_name_or_path
    if name is None:
        return None
    folder = Path(work.folder, Path(name).expanduser())
    if folder.is_dir():
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # it is part of transformers, which is optional
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a valid hub name
        return None
    return Path(found) if isinstance(found, str) else None


_WHAT = "the memory of this model cannot be estimated"
# Supported keys about experts, and those that change no size.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_KNOWN_OF_EXPERTS = {
    *_EXPERTS,
    "decoder_sparse_step",
    "experts_per_token",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_shared_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
}
OUTER = ("down_proj", "c_proj")  # names of the last layer of a feed-forward part
# peft's default targets: the first two for Llama and most others, the last for GPT-2.
_USUAL_TARGETS = ("q_proj", "v_proj", "c_attn")
_ALL_LINEAR = "all-linear"  # peft's name for all linear layers in blocks
_EMBEDDINGS = ("lm_head", "embed_tokens", "wte")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A matrix of a block, with its name as a LoRA target."""

    name: str
    inputs: int
    outputs: int
    times: int = 1  # in its block

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.times * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """The figures of a model that the formula needs."""

    blocks: int
    sparse_blocks: int  # those of them that have experts
    width: int
    query_width: int  # all heads side by side
    key_width: int
    vocabulary: int
    positions: int  # that have embeddings
    tied: bool  # input and output embeddings are one
    attention: tuple[Layer, ...]
    dense: tuple[Layer, ...]  # the feed-forward part of a block without experts
    sparse: tuple[Layer, ...]  # of one with experts
    experts_used: int  # by a token

    @property
    def block_parameters(self) -> int:
        """Parameters of the largest block."""
        feed_forward = []
        if self.sparse_blocks < self.blocks:
            feed_forward.append(_model_figures_count(self.dense))
        if self.sparse_blocks:
            feed_forward.append(_model_figures_count(self.sparse))
        return _model_figures_count(self.attention) + max(feed_forward) + 2 * self.width

    @property
    def layer_parameters(self) -> int:
        """Parameters of all matrices in blocks."""
        return sum(times * one.parameters for one, times in self._layers())

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layer_parameters + 2 * self.blocks * self.width + self.rest_parameters

    @property
    def rest_parameters(self) -> int:
        """Parameters of embeddings, head and the last norm."""
        embeddings = self.vocabulary * (1 if self.tied else 2) + self.positions
        return (embeddings + 1) * self.width

    @property
    def inner_used(self) -> int:
        """Mean inner width, over all blocks, of the feed-forward parts that a token passes."""
        dense = (self.blocks - self.sparse_blocks) * _inner(self.dense)
        expert = _inner([one for one in self.sparse if one.times > 1])
        shared = _inner([one for one in self.sparse if one.times == 1])
        return (dense + self.sparse_blocks * (self.experts_used * expert + shared)) // self.blocks

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest matrix in a block."""
        return max(one.inputs * one.outputs for one, times in self._layers() if times)

    def copied_parameters(self, names: Sequence[str]) -> int:
        """Parameters of layers that LoRA trains whole; raise if a name is unknown."""
        known = dict.fromkeys(_EMBEDDINGS, self.vocabulary * self.width)
        known |= {one.name: times * one.parameters for one, times in self._layers()}
        if unknown := [name for name in names if name not in known]:
            raise Impossible(
                _WHAT,
                why=f"the size of these layers is unknown: {', '.join(unknown)}",
                fix=f"choose model.lora_modules_to_save from {', '.join(sorted(known))}",
            )
        return sum(known[name] for name in names)

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Parameters of LoRA's matrices; raise if a target's name is unknown."""
        known = {one.name for one, _ in self._layers()}
        if targets is not None and list(targets) == [_ALL_LINEAR]:
            targets = sorted(known)
        wanted = _USUAL_TARGETS if targets is None else targets
        unknown = [name for name in targets or () if name not in known]
        if unknown or not known.intersection(wanted):
            raise Impossible(
                _WHAT,
                why=f"the size of these LoRA targets is unknown: {', '.join(unknown or wanted)}",
                fix=f"choose model.lora_targets from {', '.join(sorted(known))}",
            )
        return rank * sum(
            times * one.times * (one.inputs + one.outputs)
            for one, times in self._layers()
            if one.name in wanted
        )

    def _layers(self) -> list[tuple[Layer, int]]:
        """Return each layer with the number of blocks that have it."""
        return [
            *((one, self.blocks) for one in self.attention),
            *((one, self.blocks - self.sparse_blocks) for one in self.dense),
            *((one, self.sparse_blocks) for one in self.sparse),
        ]


def _model_figures_count(layers: Sequence[Layer]) -> int:
    return sum(one.parameters for one in layers)


def _inner(layers: Sequence[Layer]) -> int:
    return sum(one.inputs for one in layers if one.name in OUTER)


def model_figures(work: Work) -> ModelFigures:
    """Read a model's configuration; raise if it is missing or of another kind."""
    if work.model_name_or_path is None:
        raise Impossible(
            _WHAT,
            why="the formula needs a transformers configuration, but a function builds this model",
            fix="remove the operations that cannot be traced, or measure the model: "
            "muster plan --verify",
        )
    told = model_configuration(work)
    if told is None:
        raise Impossible(
            _WHAT,
            why=f"{work.model_name_or_path} has no readable config.json here",
            fix="give the folder of a model with a config.json",
        )
    return _Reading(told, work.model_name_or_path).figures()


class _Reading:
    """Read a configuration key by key: models have several names for one figure."""

    def __init__(self, told: Mapping[str, Any], model: str) -> None:
        self._told = told
        self._model = model
        self._width = self._number("hidden_size", "n_embd", "d_model")
        self._heads = self._number(
            "num_attention_heads", "n_head", default=max(self._width // 128, 1)
        )
        self._key_heads = self._number(
            "num_key_value_heads", default=1 if told.get("multi_query") else self._heads
        )
        self._plain = self._number("qk_nope_head_dim", default=0)  # DeepSeek's have two parts
        self._turned = self._number("qk_rope_head_dim", default=0)
        self._head_width = self._plain + self._turned or self._number(
            "head_dim", default=self._width // self._heads
        )
        self._inner = self._number(
            "intermediate_size", "n_inner", "ffn_dim", default=4 * self._width
        )
        self._is_gpt2 = "n_embd" in told
        self._gated = not self._is_gpt2 and self._has_gate()

    def figures(self) -> ModelFigures:
        blocks = self._number("num_hidden_layers", "n_layer", "num_layers")
        # Their files do not mention it: transformers ties them by default.
        ties = not self._gated or str(self._told.get("model_type", "")).startswith("gemma")
        return ModelFigures(
            blocks=blocks,
            sparse_blocks=self._sparse_blocks(blocks),
            width=self._width,
            query_width=self._heads * self._head_width,
            key_width=self._key_heads * self._head_width,
            vocabulary=self._number("vocab_size"),
            positions=self._number("n_positions", default=0),
            tied=bool(self._told.get("tie_word_embeddings", ties)),
            attention=self._attention(),
            dense=self._feed_forward(self._inner),
            sparse=self._sparse(),
            experts_used=self._number("num_experts_per_tok", "experts_per_token", default=1),
        )

    def _number(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            found = self._told.get(key)
            if isinstance(found, int) and found > 0:
                return found
        if default is None:
            raise Impossible(
                _WHAT,
                why=f"the configuration of {self._model} has no {' or '.join(keys)}",
                fix="the formula is for transformers; remove the operations that cannot be traced",
            )
        return default

    def _has_gate(self) -> bool:
        """Return whether the feed-forward part has a gate, as in all models since Llama."""
        names = ("hidden_act", "activation_function", "activation")
        activation = next((self._told[name] for name in names if self._told.get(name)), None)
        if "rms_norm_eps" in self._told:
            return True
        if activation is not None:
            return activation in ("silu", "swish")
        return not any(key.startswith("layer_norm_e") for key in self._told)

    def _attention(self) -> tuple[Layer, ...]:
        width, queries = self._width, self._heads * self._head_width
        if self._is_gpt2:
            return (
                Layer(name="c_attn", inputs=width, outputs=3 * width),
                Layer(name="c_proj", inputs=width, outputs=width),
            )
        if self._number("kv_lora_rank", default=0):
            return self._compressed_attention()
        keys = self._key_heads * self._head_width
        return (
            Layer(name="q_proj", inputs=width, outputs=queries),
            Layer(name="k_proj", inputs=width, outputs=keys),
            Layer(name="v_proj", inputs=width, outputs=keys),
            Layer(name="o_proj", inputs=queries, outputs=width),
        )

    def _compressed_attention(self) -> tuple[Layer, ...]:
        """Return DeepSeek's attention, which compresses keys, values and queries to one vector."""
        width, heads = self._width, self._heads
        narrow = self._number("kv_lora_rank")
        values = self._number("v_head_dim")
        narrow_queries = self._number("q_lora_rank", default=0)
        queries = heads * self._head_width
        return (
            *(
                (
                    Layer(name="q_a_proj", inputs=width, outputs=narrow_queries),
                    Layer(name="q_b_proj", inputs=narrow_queries, outputs=queries),
                )
                if narrow_queries
                else (Layer(name="q_proj", inputs=width, outputs=queries),)
            ),
            Layer(name="kv_a_proj_with_mqa", inputs=width, outputs=narrow + self._turned),
            Layer(name="kv_b_proj", inputs=narrow, outputs=heads * (self._plain + values)),
            Layer(name="o_proj", inputs=heads * values, outputs=width),
        )

    def _feed_forward(self, inner: int, times: int = 1) -> tuple[Layer, ...]:
        width = self._width
        into, out = ["gate_proj", "up_proj"] if self._gated else ["up_proj"], "down_proj"
        if self._is_gpt2:
            into, out = ["c_fc"], "c_proj"
        return (
            *(Layer(name=name, inputs=width, outputs=inner, times=times) for name in into),
            Layer(name=out, inputs=inner, outputs=width, times=times),
        )

    def _experts(self) -> int:
        return self._number(*_EXPERTS, default=0)

    def _sparse(self) -> tuple[Layer, ...]:
        experts = self._experts()
        if experts < 2:
            return ()
        inner = self._number("moe_intermediate_size", default=self._inner)
        shared = self._number(
            "shared_expert_intermediate_size",
            default=inner * self._number("n_shared_experts", default=0),
        )
        return (
            *self._feed_forward(inner, times=experts),
            *(self._feed_forward(shared) if shared else ()),
            Layer(name="gate", inputs=self._width, outputs=experts),
        )

    def _sparse_blocks(self, blocks: int) -> int:
        """Return how many blocks have experts; raise if the configuration has unknown keys."""
        if not_understood := [
            key
            for key, value in self._told.items()
            if ("expert" in key or "moe" in key)
            and value
            and (key not in _KNOWN_OF_EXPERTS or not isinstance(value, int))
        ]:
            raise Impossible(
                _WHAT,
                why=f"the configuration of {self._model} has unknown keys for its experts: "
                f"{', '.join(sorted(not_understood))}",
                fix="the formula supports experts as in Mixtral, Qwen and DeepSeek; remove the "
                "operations that cannot be traced",
            )
        if self._experts() < 2:
            return 0
        every = self._number("decoder_sparse_step", "moe_layer_freq", default=1)
        if "n_routed_experts" in self._told:  # DeepSeek counts from the first block
            first = self._number("first_k_dense_replace", default=0)
            return sum(number % every == 0 for number in range(first, blocks))
        dense = self._told.get("mlp_only_layers") or ()
        return sum(number not in dense and (number + 1) % every == 0 for number in range(blocks))
