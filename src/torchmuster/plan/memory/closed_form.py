"""Memory by a formula, for models that cannot be traced and candidates too large to be traced.

Weights, gradients and the optimizer's states are counted from the configuration of a transformers
model; activations are computed for a Llama-like decoder with fused attention. For 124
configurations of ten models on GPUs (GPT-2, Llama, Mistral, Mixtral, Qwen; some with LoRA), traced
tensor peaks were 0.87 to 1.13 times the formula. On a CPU, attention with dropout keeps its scores,
which are not counted: GPT-2 needs twice as much there.
"""

from collections.abc import Mapping

from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.device_terms import outside_allocator
from torchmuster.plan.memory.forecast import (
    USUAL_ALLOCATOR,
    WHOLE_ELEMENTS,
    Memory,
    caches_memory,
    device_bytes,
)
from torchmuster.plan.memory.model_figures import OUTER, ModelFigures, model_figures, weights_dtype
from torchmuster.plan.memory.shard_degree import FOUR_BIT_BYTES, ITEM_BYTES, OPTIMIZER_COPIES

BAND = 0.2  # of tensor memory, up and down
_ADAPTER_BYTES = 4  # peft keeps its matrices in float32


def estimate_memory(work: Work, candidate: Candidate, *, hardware: Hardware) -> Memory:
    """Estimate what a rank needs, without a trace."""
    model = model_figures(work)
    if work.sequence_length is None:
        raise Impossible(
            "the memory of this model cannot be estimated",
            why="the sequence length is unknown",
            fix="set data.sequence_length",
        )
    states = _states(model, work)
    whole = states["gradients"] + states["optimizer"]  # frozen parameters are not saved
    on_host = 0
    if candidate.cpu_offload:
        on_host = sum(states.values()) // candidate.layout.shards
        states = dict.fromkeys(states, 0)
    categories = _at_the_peak(model, states, work, candidate, tokens=work.sequence_length)
    tensors = sum(categories.values())
    terms = outside_allocator(candidate, hardware)
    caches = caches_memory(hardware)
    middle, _, _ = device_bytes(tensors, None, caches=caches)
    _, low, _ = device_bytes(round((1.0 - BAND) * tensors), None, caches=caches)
    _, _, high = device_bytes(round((1.0 + BAND) * tensors), None, caches=caches)
    here = min(hardware.cards_per_machine, candidate.layout.ranks)
    return Memory(
        tensor_bytes=tensors,
        by_category=categories,
        where=None,
        reserved_bytes=None,
        outside=terms,
        total_bytes=middle + sum(term.size_bytes for term in terms),
        low_bytes=low + sum(term.low_bytes for term in terms),
        high_bytes=high + sum(term.high_bytes for term in terms),
        host_bytes=on_host * here,
        save_host_bytes=whole * here // candidate.layout.ranks,
        save_bytes=whole,
        origin=_origin(caches=caches),
    )


def _origin(*, caches: bool) -> str:
    words = f"tensors: a formula (assumed within {BAND:.0%}), as this model could not be traced"
    return f"{words}; {USUAL_ALLOCATOR}" if caches else words


def _states(model: ModelFigures, work: Work) -> dict[str, int]:
    """Return the bytes of weights, gradients and moments (trained parameters only) of all ranks."""
    item = _weight_bytes(work)
    weights = trained = round(model.parameters * item)
    if work.load_in_4bit:
        others = model.parameters - model.layer_parameters
        weights = round(model.layer_parameters * FOUR_BIT_BYTES + others * item)
    if work.lora_rank is not None:
        trained = _ADAPTER_BYTES * model.adapter_parameters(work.lora_rank, work.lora_targets)
        copied = model.copied_parameters(work.lora_modules_to_save or ())
        trained += round(copied * item)
        weights += trained
    moments = round(trained * OPTIMIZER_COPIES[work.optimizer])
    return {"parameters": weights, "gradients": trained, "optimizer": moments}


def _at_the_peak(
    model: ModelFigures, states: Mapping[str, int], work: Work, candidate: Candidate, *, tokens: int
) -> Mapping[str, int]:
    """Return the memory at the loss, with gathers of a backward, or in the update: the larger."""
    shards = candidate.layout.shards if candidate.strategy == "fsdp" else 1
    own = {name: -(-size // shards) for name, size in states.items()}
    # Gradients of earlier micro-batches; DDP also has buckets for all of them.
    copies = (candidate.accumulation > 1) + (candidate.strategy == "ddp")
    tokens *= candidate.micro_batch_size
    loss = {
        **own,
        "gradients": copies * own["gradients"],
        "activations": _activations(model, work, candidate, tokens=tokens),
        "logits": _logits(tokens * model.vocabulary, work, candidate),
        "collectives": _gathered(model, work, candidate),
        "temporaries": _dequantized(model, work, candidate),
    }
    update = {
        **own,
        "activations": 0,
        "logits": 0,
        "collectives": 0,
        "temporaries": own["gradients"],  # a copy of what is updated
    }
    return max(loss, update, key=lambda one: sum(one.values()))


def _dequantized(model: ModelFigures, work: Work, candidate: Candidate) -> int:
    """Return the memory of the 4-bit layer that is computed: its weights in the dtype of products."""
    if not work.load_in_4bit:
        return 0
    return model.largest_layer * _computed_bytes(work, candidate)


def _weight_bytes(work: Work) -> float:
    return ITEM_BYTES.get(weights_dtype(work), 1)


def _computed_bytes(work: Work, candidate: Candidate) -> int:
    return round(_weight_bytes(work)) if candidate.precision == "fp32" else 2


def _activations(model: ModelFigures, work: Work, candidate: Candidate, *, tokens: int) -> int:
    item = _computed_bytes(work, candidate)
    kept = {"none": 1.0, "selective": 0.55, "full": 0.0}.get(str(candidate.recompute))
    if kept is None:  # every N-th block keeps nothing
        kept = 1.0 - 1.0 / int(candidate.recompute)
    block = tokens * item * _kept_of_token(model, work)
    inputs = tokens * item * model.width
    found = round(model.blocks * (kept * block + inputs) + (1.0 - kept) * block)
    if candidate.strategy != "fsdp" and item < _weight_bytes(work):
        # Copies of the weights that autocast keeps.
        cast = model.parameters - (model.layer_parameters if work.load_in_4bit else 0)
        found += cast * item
    return found


def _kept_of_token(model: ModelFigures, work: Work) -> int:
    """Return the elements that a block keeps per token: norms, attention, feed-forward part."""
    attention = 2 * model.query_width + 2 * model.key_width
    # A frozen layer needs no inputs for gradients of its weights.
    is_frozen = work.lora_rank is not None and not set(OUTER).intersection(work.lora_targets or ())
    return 5 * model.width + attention + (3 if is_frozen else 4) * model.inner_used


def _logits(elements: int, work: Work, candidate: Candidate) -> int:
    item = _computed_bytes(work, candidate)
    if work.loss in (None, "language_model"):
        # The logits and their gradients; the loss converts parts of them to float32.
        return elements * 2 * item + min(elements, WHOLE_ELEMENTS) * 8
    return elements * (item + 8)


def _gathered(model: ModelFigures, work: Work, candidate: Candidate) -> int:
    """Return what FSDP gathers: embeddings, the current block, the next one; and its gradients."""
    if candidate.strategy != "fsdp":
        return 0
    block = model.block_parameters
    weights = model.rest_parameters + 2 * block if candidate.reshard else model.parameters
    gradients = 0 if work.lora_rank else 2 * block
    return (weights + gradients) * _computed_bytes(work, candidate)
