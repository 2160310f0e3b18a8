"""What published formulas say of a case, written down anew from their sources.

All of them are meant for GPUs and for number types of 16 bits with float32 copies; each is given what its documentation says fits
the case best. ``None``: it has nothing to say about such a model.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer by its sizes; ``vocabulary`` counts classes where there are no words."""

    parameters: int
    largest_layer: int  # parameters of the largest module that has no modules
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    gated: bool  # the feed-forward network has three matrices
    vocabulary: int
    tied: bool
    sequence: int


Case = dict[str, Any]


def deepspeed(case: Case, parameters: int, largest_layer: int) -> float:
    """Model states alone, as ZeRO-2 for copies and ZeRO-3 for shards.

    deepspeedai/DeepSpeed, docs/code-docs/source/memory.rst: 4 P + 16 P / N, and 4 L + 18 P / N.
    """
    if case["strategy"] == "fsdp":
        return 4 * largest_layer + 18 * parameters / case["shards"]
    return 4 * parameters + 16 * parameters  # gradients and states of copies are whole


def eleuther(case: Case, shape: Shape) -> float:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py, with its buffers for ZeRO left out: they alone are gigabytes."""
    s, b, h, layers = shape.sequence, case["micro_batch_size"], shape.hidden, shape.layers
    ratio = shape.key_value_heads / shape.heads
    parameters = 2 * shape.vocabulary * h + h * s + 8 * h * layers + 2 * h
    parameters += int(2 * (1 + ratio) * layers * h * h)
    parameters += (3 if shape.gated else 2) * layers * h * shape.feed_forward
    low = 4 if case["number_type"] == "fp32" else 2
    shards = case["shards"] if case["strategy"] == "fsdp" else 1
    states = parameters * (low + 4 + (12 if case["optimizer"] == "adamw" else 8)) / shards
    of_token = 16 * low + 2
    if case["recompute"] == "none":
        of_token += (2 * low + 1) * shape.heads * s / h
    return float(states + s * b * h * layers * of_token)


def megatron(case: Case, shape: Shape) -> float:
    """NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py: 18 bytes a parameter, or 6 + 12 / N."""
    s, b, h = shape.sequence, case["micro_batch_size"], shape.hidden
    ratio = shape.key_value_heads / shape.heads
    feed_forward = shape.feed_forward * (1.5 if shape.gated else 1.0)
    norms = 1 if shape.gated else 2
    of_layer = 2 * h * (feed_forward + norms) + 2 * h * h * (1 + ratio)
    embeddings = (1 if shape.tied else 2) * h * shape.vocabulary
    parameters = of_layer * shape.layers + norms * h + embeddings
    of_parameter = 6 + 12 / case["shards"] if case["strategy"] == "fsdp" else 18
    activations = s * b * h * (10 + 24) * shape.layers + 8 * s * b + s * b * h
    activations += 2 * (s * b * shape.vocabulary + s * b * h)
    return float(parameters * of_parameter + 1.05 * activations)
