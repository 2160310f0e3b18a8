"""A value that was chosen automatically, and the reason for it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[T]):
    """An automatic choice and its reason, so that every automatic choice can be reported.

    ``reason`` is a sentence for the user: what decided the choice, and what was rejected.
    """

    value: T
    reason: str
