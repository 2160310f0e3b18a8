"""How well texts are explained: right cause first, honestly unknown, or wrong."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from torchmuster.known_errors.explain import explain_text

CORPUS = Path(__file__).parent / "corpus"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A text, and the cause that an expert names from it."""

    text: str
    cause: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many were named right; of the others, which were said to be unknown, and which were wrong."""

    total: int
    unknown: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def right(self) -> int:
        """How many have the right cause first."""
        return self.total - len(self.unknown) - len(self.wrong)

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.total} right first, {len(self.unknown)} unknown, "
            f"{len(self.wrong)} wrong"
        )


def cases(name: str) -> list[Case]:
    """Read the cases of a file of the corpus."""
    listed = YAML(typ="safe").load((CORPUS / name).read_text(encoding="utf-8"))
    return [Case(text=one["text"], cause=one["cause"], source=one["source"]) for one in listed]


def cause_of(text: str) -> str:
    """Return the name of the cause that comes first, or that it is unknown."""
    explanations = explain_text(text)
    return explanations[0].name if explanations else UNKNOWN


def score(listed: Iterable[Case]) -> Score:
    """Explain every text, and count."""
    total = 0
    unknown: list[str] = []
    wrong: list[str] = []
    for one in listed:
        total += 1
        got = cause_of(one.text)
        if got == one.cause:
            continue
        words = f"{one.source}: {one.cause}, explained as {got}"
        (unknown if got == UNKNOWN else wrong).append(words)
    return Score(total=total, unknown=tuple(unknown), wrong=tuple(wrong))
