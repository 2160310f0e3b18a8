"""What tensor, pipeline and context parallelism would take, by formulas: for what-if only.

torchmuster trains none of them. It says where they would pay, and compares itself with published trainings that use
them. The forms are those of torchtitan: FSDP outside, tensor parallelism with sequence-parallel norms inside a
machine, keys and values gathered over the ranks of a context, blocks kept whole while a pipeline runs. Here is the
memory; ``beyond_time.py`` has the time.
"""

import math
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "op", "full"] | int

BF16, FP32 = 2, 4  # bytes
_STATES = 4 * FP32  # a weight, its gradient and two moments


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A transformer of the Llama kind."""

    blocks: int
    width: int
    inner: int  # of the gated feed-forward part
    heads: int
    key_heads: int
    vocabulary: int
    head_width: int = 128

    @property
    def query_width(self) -> int:
        """All heads of the queries side by side."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """All heads of the keys side by side."""
        return self.key_heads * self.head_width

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def rest_parameters(self) -> int:
        """Embedding, head and the last norm."""
        return 2 * self.vocabulary * self.width + self.width

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.blocks * self.block_parameters + self.rest_parameters

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Return a block's matrices as FSDP sees them: rows, and elements of a row."""
        return (
            (self.query_width, self.width),
            (self.key_width, self.width),
            (self.key_width, self.width),
            (self.width, self.query_width),
            (self.inner, self.width),
            (self.inner, self.width),
            (self.width, self.inner),
            (self.width, 2),
        )

    def model_flops(self, sequence_length: int) -> float:
        """Return what a token asks for, forward and backward, by the usual convention."""
        trained = self.parameters - self.vocabulary * self.width
        return 6.0 * trained + 12.0 * self.blocks * self.query_width * sequence_length


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How ranks share a training; FSDP shards over ``shards x context`` ranks."""

    copies: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    chunks: int = 1  # pieces of the pipeline that each rank has

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """How many ranks have samples of their own."""
        return self.copies * self.shards

    @property
    def sharded_over(self) -> int:
        """Over how many ranks FSDP spreads a parameter."""
        return self.shards * self.context


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What a rank with samples of its own computes in a step."""

    sequence_length: int
    batch: int  # sequences
    micro_batches: int = 1  # into how many it is cut
    recompute: Recompute = "none"
    loss_bytes: int = (
        12  # for each logit at the worst moment: its softmax and two gradients, in float32
    )

    def tokens(self, spread: Spread) -> float:
        """Return the tokens of a micro-batch that one rank sees."""
        return self.batch * self.sequence_length / self.micro_batches / spread.context


def inflation(decoder: Decoder, shards: int, *, tensor: int = 1) -> float:
    """Return how many times its own size a gathered block takes, for rows that are made up.

    Tensor parallelism halves rows of most matrices before FSDP sees them, so fewer are left to share.
    """
    whole = made = 0
    for number, (rows, columns) in enumerate(decoder.rows):
        by_rows = number not in (3, 6, 7)  # those that give back to the width are cut by columns
        rows = rows // tensor if by_rows else rows
        columns = columns if by_rows or number == 7 else columns // tensor
        whole += rows * columns
        made += shards * math.ceil(rows / shards) * columns
    return made / whole


def memory(decoder: Decoder, spread: Spread, portion: Portion) -> dict[str, float]:
    """Return what tensors of a rank take at the worst moment of a step, in bytes, by what they are."""
    shards, tensor = spread.sharded_over, spread.tensor
    blocks = math.ceil(decoder.blocks / spread.pipeline)
    # The ends of a pipeline have an embedding or a head; one rank has both where there is no pipeline.
    rest = decoder.rest_parameters / tensor / (1 if spread.pipeline == 1 else 2)
    block = decoder.block_parameters / tensor
    padded = block * inflation(decoder, shards, tensor=tensor)
    found = {"states": _STATES * (blocks * padded + rest) / shards}
    if spread.pipeline > 1:  # whole between micro-batches, and so are their gradients
        found["gathered"] = (BF16 + FP32) * (blocks * block + rest)
    elif shards > 1:
        # Two blocks in use and on their way, one more in float32 to be reduced; the rest stays whole.
        found["gathered"] = (2 * BF16 + 2 * FP32) * padded + BF16 * rest
    tokens = portion.tokens(spread)
    in_flight = _in_flight(spread, portion)
    found["activations"] = in_flight * blocks * tokens * _kept(decoder, spread, portion.recompute)
    # One block's own intermediates are there in its backward, or the logits at the end of the forward.
    working = tokens * _kept(decoder, spread, "none") if portion.recompute != "none" else 0.0
    logits = tokens * portion.loss_bytes * decoder.vocabulary / tensor
    found["worst moment"] = max(working, logits)
    return found


def _in_flight(spread: Spread, portion: Portion) -> float:
    """Return how many micro-batches the first stage has begun and not finished."""
    if spread.pipeline == 1:
        return 1.0
    if spread.chunks == 1:
        return min(spread.pipeline, portion.micro_batches)
    warm = (spread.pipeline - 1) * 2 + (spread.chunks - 1) * spread.pipeline + 1
    return min(warm, portion.micro_batches * spread.chunks) / spread.chunks


def _kept(decoder: Decoder, spread: Spread, recompute: Recompute) -> float:
    """Return what a block keeps of each token for its backward, in bytes."""
    width, tensor = decoder.width, spread.tensor
    every = 16 * width / tensor + (8 * decoder.query_width + 8 * decoder.inner) / tensor
    every += 4 * width * (tensor > 1)  # gathered over the ranks before the products
    entering = BF16 * width / tensor
    if recompute == "none":
        return every
    if recompute == "full":
        return entering
    if recompute == "op":  # queries, values, gate and result; what attention gives back
        kept = 2 * decoder.query_width + decoder.key_width + decoder.inner + width
        return entering + BF16 * kept / tensor
    return (every * (recompute - 1) + entering) / recompute
