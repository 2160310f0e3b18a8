"""What is trained on: cards, machines and the links between them, as plain values with their sources."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator, or a rank's part of a machine's CPUs. What is not known is missing, never guessed."""

    name: str
    memory_bytes: int  # what a program can use of it, as the driver reports it
    flops: Mapping[str, float]  # highest rate by number type: float32, bfloat16, float16
    bandwidth_bytes_s: float | None  # of its memory
    kind: str = "cuda"  # cuda, rocm, xpu, mps, cpu
    source: str = ""  # where these figures come from
    number_types: tuple[str, ...] | None = None  # those it computes fast; None: nobody says

    @property
    def noun(self) -> str:
        """What people call one of them: a CPU has no cards, but ranks that share it."""
        return "rank" if self.kind == "cpu" else "card"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message takes: a time of its own, and its bytes over a rate, in each direction."""

    latency_s: float
    bytes_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines that are alike."""

    card: Card
    machines: int
    cards_per_machine: int
    within: Link  # between two cards of a machine
    between: Link  # of one card, to another machine
    host_memory_bytes: int | None = None  # of one machine
    price_per_card_hour: float | None = None
    assumed: tuple[str, ...] = ()  # what nobody said, as sentences for people

    @property
    def cards(self) -> int:
        """All of them."""
        return self.machines * self.cards_per_machine
