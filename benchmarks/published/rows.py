"""The published rows as values: what the product and the formulas are asked for each of them."""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
sys.path.insert(0, str(MODELS))

from decoder_memory import Decoder, Portion, Spread  # noqa: E402
from shapes import SHAPES  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published training."""

    name: str
    source: str
    stack: str
    card: str
    model: str
    sequence_length: int
    batch: int
    recompute: str | int
    use: str = "judged"  # or constant: it gives its stack's one constant
    seen: bool = False  # the constants of the product were made with it in view
    accumulation: int = 1
    copies: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batches: int = 1
    chunks: int = 1
    compile: bool = False
    float8: bool = False
    async_tensor: bool = False
    weights: str = "float32"
    keeps_whole_gradients: bool = (
        False  # until the last micro-batch; the product shards them after each
    )
    allocator: str = "expandable"
    cards_per_machine: int = 8
    tokens_per_s: float | None = None  # of one card
    tflops: float | None = None  # of one card, where that is what was published
    reserved_gib: float | None = None
    allocated_gib: float | None = None

    @property
    def decoder(self) -> Decoder:
        """The model's shape."""
        return SHAPES[self.model]

    @property
    def published_tokens_per_s(self) -> float | None:
        """Return the speed of one card."""
        if self.tflops is None:
            return self.tokens_per_s
        return self.tflops * 1e12 / self.decoder.model_flops(self.sequence_length)

    @property
    def whole_gradients_gib(self) -> float:
        """What gradients take that are not sharded before the last micro-batch."""
        return 4 * self.decoder.parameters / GiB if self.keeps_whole_gradients else 0.0

    @property
    def spread(self) -> Spread:
        """How its ranks share the training."""
        return Spread(
            copies=self.copies,
            shards=self.shards,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            chunks=self.chunks,
        )

    @property
    def is_plain(self) -> bool:
        """Say whether the product itself can train so, number type aside."""
        return self.tensor == self.pipeline == self.context == 1

    @property
    def portion(self) -> Portion:
        """What a rank with samples of its own computes in a step."""
        old_loss = self.model.startswith(("llama2_7b", "kempner"))
        return Portion(
            sequence_length=self.sequence_length,
            batch=self.batch * self.accumulation,
            micro_batches=max(self.micro_batches, self.accumulation),
            recompute=self.recompute,  # type: ignore[arg-type]
            loss_bytes=8 if old_loss else 12,
        )

    @property
    def work(self) -> Work:
        """What the product traces for it."""
        own = "_op" if self.recompute == "op" else ""
        plain = self.model in ("llama2_7b", "kempner_8b", "kempner_13b")
        return Work(
            build=f"llama:{self.model}{own}",
            torch_dtype=None if self.weights == "float32" else self.weights,
            loss="llama:loss_as_it_comes" if plain else "llama:loss",
            sequence_length=self.sequence_length,
            clip_norm=1.0,
            folder=str(MODELS),
        )

    @property
    def candidate(self) -> Candidate:
        """The way it was spread, as the product says it."""
        single = self.spread.ranks == 1
        return Candidate(
            strategy="single" if single else "fsdp",
            layout=ShardLayout(copies=self.copies, shards=self.shards),
            precision="bf16",
            recompute="none" if self.recompute == "op" else self.recompute,  # type: ignore[arg-type]
            micro_batch_size=self.batch,
            accumulation=self.accumulation,
        )


@dataclass(frozen=True, kw_only=True)
class Published:
    """All rows, with where they come from."""

    rows: tuple[Row, ...]
    sources: dict[str, str]
    cards: dict[str, dict[str, float]]

    def hardware(self, row: Row) -> Hardware:
        """Return what a row ran on."""
        known = self.cards[row.card]
        machines = -(-row.spread.ranks // row.cards_per_machine)
        return Hardware(
            card=Gpu(
                name=row.card.upper(),
                memory_bytes=int(known["memory_gib"] * GiB),
                flops={"bfloat16": known["bfloat16_flops"], "float32": 60e12},
                bandwidth_bytes_s=known["bandwidth_bytes_s"],
                within_bytes_s=known["within_bytes_s"],
                network_bytes_s=known["between_bytes_s"],
                network_is_shared=False,
            ),
            machines=machines,
            cards_per_machine=min(row.cards_per_machine, row.spread.ranks),
        )

    def constant(self, stack: str) -> Row:
        """Return the row that gives a stack's constant."""
        return next(row for row in self.rows if row.stack == stack and row.use == "constant")


def read() -> Published:
    """Read the rows."""
    held: dict[str, Any] = tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))
    return Published(
        rows=tuple(Row(**row) for row in held["rows"]),
        sources=held["sources"],
        cards=held["cards"],
    )
