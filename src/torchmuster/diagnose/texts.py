"""The texts of findings: one table for each area in ``findings/``, filled with values here.

A check decides which finding and with which values; what the user reads stands in the table. An entry
``[name:variant]`` is another text of the finding ``name``.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

from torchmuster.finding import Finding, Status

_TABLES = Path(__file__).with_name("findings")


@functools.cache
def read_texts() -> Mapping[str, Mapping[str, str]]:
    """Return the entries of all tables by their keys."""
    entries: dict[str, dict[str, str]] = {}
    for path in sorted(_TABLES.glob("*.toml")):
        entries |= tomllib.loads(path.read_text(encoding="utf-8"))
    return entries


def finding(
    key: str, *, status: Status | None = None, hosts: tuple[str, ...] = (), **values: object
) -> Finding:
    """Return a finding whose texts are those of ``key``, filled with these values.

    ``status`` is for findings whose severity depends on the values; the others have it in the table.
    """
    entry = read_texts()[key]
    texts = {}
    for field in ("what", "why", "fix", "evidence"):
        texts[field] = entry.get(field, "").format_map(values)
    return Finding(
        name=key.partition(":")[0],
        status=status or Status(entry["status"]),
        hosts=hosts,
        **texts,
    )
