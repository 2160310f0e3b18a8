"""The assumptions as data, and what result files say about each of them."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources

import msgspec

from torchmuster.selftest.record import SelftestRecord

_FILE = "assumptions.toml"


class Assumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that was not tested: the claim, what would show it, and the hardware that this needs."""

    id: str
    text: str
    shown_by: str
    needs: tuple[str, ...]
    check: str = ""  # id of the check that shows it; "": none
    tested: str = ""  # what was tested instead


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assumptions about one subject."""

    title: str
    intro: str = ""
    assumption: tuple[Assumption, ...] = ()


class Scope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table of what was not tested at all."""

    not_tested: str
    instead: str


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    intro: str
    scope: tuple[Scope, ...]
    section: tuple[Section, ...]

    @property
    def all(self) -> list[Assumption]:
        """The assumptions of all sections."""
        return [one for section in self.section for one in section.assumption]


@cache
def known_assumptions() -> Assumptions:
    """Read the assumptions."""
    text = resources.files("torchmuster.selftest").joinpath(_FILE).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Assumptions)


def status_of(assumption: Assumption, records: Sequence[SelftestRecord]) -> str:
    """Return "untested", "confirmed on …" or "refuted on …"; a refutation outweighs everything."""
    seen: dict[str, list[str]] = {"confirmed": [], "refuted": []}
    for record in records:
        fits = set(assumption.needs) <= {"nothing", *record.has} and not record.planted
        for result in record.checks:
            if fits and result.id == assumption.check and result.verdict in seen:
                seen[result.verdict].append(_where(record))
    for verdict in ("refuted", "confirmed"):
        if seen[verdict]:
            return f"{verdict} on {'; '.join(dict.fromkeys(seen[verdict]))}"
    return "untested"


def _where(record: SelftestRecord) -> str:
    hardware = ", ".join(record.hardware.get("gpus", [])) or "a CPU"
    return f"{hardware} (torch {record.versions.get('torch', '?')}, {record.made[:10]})"
