"""How long a step with tensor, pipeline or context parallelism would take, by formulas: for what-if only.

Elementwise operations are not counted: they are part of the one share of the card's rate that is given.
"""

import math
from dataclasses import dataclass

from decoder_memory import (
    BF16,
    FP32,
    Decoder,
    Portion,
    Recompute,
    Spread,
    inflation,
)

from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.timing import rates as links
from torchmuster.plan.timing.rates import Rates

_UPDATE = 7 * FP32  # what the optimizer reads and writes of a weight
_ATTENTION_BACKWARD = 2.5  # times its forward: it computes the scores again (FlashAttention-2)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What of a card's rate is reached."""

    products: float  # by the matrix products, of the bfloat16 rate; float8 can be above 1
    attention: float
    hides_tensor: bool = False  # torch's asynchronous tensor parallelism
    gathered_bytes: int = BF16  # of a weight on its way to the ranks; 1 with float8


@dataclass(frozen=True, kw_only=True)
class Time:
    """One step, in seconds; the parts add up to it."""

    compute_s: float
    tensor_s: float  # activations that tensor and context parallelism exchange
    exposed_s: float  # gathers and sums that computing waits for
    bubble_s: float  # stages of a pipeline that wait for work
    update_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.tensor_s + self.exposed_s + self.bubble_s + self.update_s


def step_time(
    decoder: Decoder,
    spread: Spread,
    portion: Portion,
    *,
    hardware: Hardware,
    shares: Shares,
    rates: Rates,
) -> Time:
    """Return how long a step takes on the slowest rank."""
    parts = _Block(decoder, spread, portion, hardware=hardware, shares=shares, rates=rates)
    blocks = math.ceil(decoder.blocks / spread.pipeline)
    head = parts.head_s * (1 if spread.pipeline == 1 else 0)  # fewer blocks make up for it
    computing = blocks * (parts.forward_s + parts.backward_s) + head
    exchanging = blocks * (parts.exchange_forward_s + parts.exchange_backward_s)
    one = computing + exchanging
    times = portion.micro_batches
    if spread.pipeline == 1:
        waits = blocks * parts.waits_s
        exposed = times * waits + parts.gather_s + parts.reduce_s
        bubble = 0.0
    else:
        # Gathered once, and reduced beside the last backward.
        exposed = max(0.0, blocks * (parts.gather_s + parts.reduce_s) - one)
        bubble = (spread.pipeline - 1) / spread.chunks * one
    states = blocks * decoder.block_parameters + decoder.rest_parameters / min(spread.pipeline, 2)
    held = states / spread.tensor / spread.sharded_over
    bandwidth = hardware.card.bandwidth_bytes_s or math.inf
    return Time(
        compute_s=times * computing,
        tensor_s=times * exchanging,
        exposed_s=exposed,
        bubble_s=bubble,
        update_s=_UPDATE * held / (bandwidth * rates.memory),
    )


class _Block:
    """The times of one block for one micro-batch."""

    def __init__(
        self,
        decoder: Decoder,
        spread: Spread,
        portion: Portion,
        *,
        hardware: Hardware,
        shares: Shares,
        rates: Rates,
    ) -> None:
        self._decoder, self._spread, self._portion = decoder, spread, portion
        self._hardware, self._shares, self._rates = hardware, shares, rates
        rate = hardware.card.flops["bfloat16"] * spread.tensor
        tokens = portion.tokens(spread)
        products = 2.0 * decoder.block_parameters * tokens / (rate * shares.products)
        # Causal: half of all pairs.
        pairs = 2.0 * portion.sequence_length * decoder.query_width * tokens
        attention = pairs / (rate * shares.attention)
        again_products, again_attention = _again(decoder, portion.recompute)
        self.forward_s = products + attention
        self.backward_s = (2.0 + again_products) * products
        self.backward_s += (_ATTENTION_BACKWARD + again_attention) * attention
        self.head_s = 6.0 * decoder.vocabulary * decoder.width * tokens / (rate * shares.products)
        exchange = self._exchange_s(tokens)
        if shares.hides_tensor:
            exchange = max(0.0, exchange - products)
        self.exchange_forward_s = exchange + self._context_s(tokens)
        again = {"none": 0.0, "op": 0.5, "full": 1.0}.get(str(portion.recompute))
        again = 1.0 / int(portion.recompute) if again is None else again
        self.exchange_backward_s = (1.0 + again) * self.exchange_forward_s
        self._shard()

    def _seconds(self, kind: str, moved_bytes: float, group: links.LinkGroup) -> float:
        return links.transfer_seconds(
            kind, moved_bytes, group, hardware=self._hardware, rates=self._rates
        )

    def _group(self, ranks: int, inside: int) -> links.LinkGroup:
        """Return a group whose neighbours are ``inside`` ranks apart."""
        on_one = max(self._hardware.cards_per_machine // inside, 1)
        return links.LinkGroup(ranks=ranks, ranks_of_machine=min(ranks, on_one))

    def _exchange_s(self, tokens: float) -> float:
        """Return what the ranks of a tensor exchange in a forward: two gathers and two scatters."""
        group = self._group(self._spread.tensor, 1)
        moved = tokens * self._decoder.width * BF16
        kinds = ("all_gather", "reduce_scatter")
        return 2.0 * sum(self._seconds(kind, moved, group) for kind in kinds)

    def _context_s(self, tokens: float) -> float:
        """Return what gathering keys and values over a context takes."""
        spread = self._spread
        moved = 2 * BF16 * tokens * spread.context * self._decoder.query_width / spread.tensor
        return self._seconds("all_gather", moved, self._group(spread.context, spread.tensor))

    def _shard(self) -> None:
        """Find out what FSDP moves for a block, and what of it computing waits for."""
        spread, decoder = self._spread, self._decoder
        shards = spread.sharded_over
        own = decoder.block_parameters / spread.tensor
        padded = own * inflation(decoder, shards, tensor=spread.tensor)
        among = self._group(shards, spread.tensor)
        self.gather_s = self._seconds("all_gather", padded * self._shares.gathered_bytes, among)
        self.reduce_s = self._seconds("reduce_scatter", padded * FP32, among)
        copies = self._group(spread.copies, spread.tensor * shards)
        self.reduce_s += self._seconds("all_reduce", padded / shards * FP32, copies)
        forward = self.forward_s + self.exchange_forward_s
        backward = self.backward_s + self.exchange_backward_s
        self.waits_s = max(0.0, self.gather_s - forward)
        self.waits_s += max(0.0, self.gather_s + self.reduce_s - backward)


def _again(decoder: Decoder, recompute: Recompute) -> tuple[float, float]:
    """Return what of a forward's products and attention is computed again."""
    if recompute == "none":
        return 0.0, 0.0
    if recompute == "full":
        return 1.0, 1.0
    if recompute == "op":  # keys, the output of attention, and the other half of the gate
        parts = decoder.width * (decoder.key_width + decoder.query_width + decoder.inner)
        return parts / decoder.block_parameters, 0.0
    return 1.0 / recompute, 1.0 / recompute
