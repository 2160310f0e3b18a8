"""What a bench says: a question, what was found, what was chosen, figures and pictures, and the record of it."""

from dataclasses import dataclass

from torchmuster.bench.record import BenchRecord
from torchmuster.decision import Decision
from torchmuster.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures as texts, with what must be known to read them."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG of ``charts``, and what can be seen in it."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of a bench, for people."""

    bench: str
    question: str  # what was asked, in one line
    findings: tuple[Finding, ...]
    choices: tuple[Decision[str], ...] = ()
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...] = ()
    record: BenchRecord
    took_s: float
