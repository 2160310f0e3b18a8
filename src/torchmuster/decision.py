"""A value that was chosen automatically, together with the reason for it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[T]):
    """What was chosen and why, so that no automatic choice is ever silent.

    ``reason`` is a sentence for people: it names what decided the choice, and what was passed over.
    """

    value: T
    reason: str
