"""The floating-point operations (FLOPs) of training a transformer, by one formula.

``train`` divides these by time and peak rate: the model FLOPs utilization (MFU).
The formula is the one of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), which
torchtitan and nanoGPT use too. Per token and parameter, a matrix product takes 2 FLOPs forward,
2 backward to its inputs and 2 backward to its weights. Attention adds 12 x layers x hidden size x
sequence length per token: two products forward and four backward, over the whole sequence, also
where a causal mask hides half of it. Recomputed activations do not count.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """What the formula needs to know of a model."""

    trained: int  # trained parameters in matrix products: all but an input embedding of its own
    frozen: int  # the same for frozen parameters, such as the base model's with LoRA
    layers: int
    hidden: int  # attention heads x size of a head

    def training_flops(self, *, rows: int, sequence_length: int) -> float:
        """Return the FLOPs of forward and backward for a batch of rows of tokens."""
        products = 6 * self.trained + 4 * self.frozen
        attention = 12 * self.layers * self.hidden * sequence_length
        return float(rows * sequence_length * (products + attention))
