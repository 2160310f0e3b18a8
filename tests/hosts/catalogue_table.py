"""The table of faults in the documentation, made of what the tests of the catalogue wrote down.

To write docs/measured/faults.md anew::

    CATALOGUE_RECORDS=build/catalogue scripts/check tests -n 0 tests/hosts/test_catalogue.py
    PYTHONPATH=tests python tests/hosts/catalogue_table.py build/catalogue
"""

import json
import sys
from pathlib import Path

from hosts.catalogue import GROUPS, Catalogued

TABLE = Path(__file__).parents[2] / "docs" / "measured" / "faults.md"


def record_of(fault: Catalogued, folder: Path) -> Path:
    """Return where a test writes down how it went with a fault."""
    return folder / f"{fault.name.replace('/', '-').replace(' ', '-')}.json"


def table(records: Path) -> str:
    """Return the whole table; every fault must have been tested."""
    parts = []
    for title, faults in GROUPS.items():
        rows = [_row(fault, records) for fault in faults]
        parts.append(f"## {title}\n\n| the fault | a bare torchrun | `muster check` says | s |")
        parts.append("|---|---|---|---|")
        parts += [*rows, ""]
    return "\n".join(parts)


def _row(fault: Catalogued, records: Path) -> str:
    told = json.loads(record_of(fault, records).read_text())
    lines = [line.strip() for line in told["fix"].splitlines() if line.strip()]
    ran = fault.mended_by.line if fault.mended_by else ""
    fix = next((line for line in lines if not line.endswith(":") and ran in line), "")
    mended = "; ran it, and the next check was clean" if ran else ""
    said = f"`{told['finding']}`: {_cell(told['what'])}. Fix: `{_cell(fix)}`{mended}"
    return f"| {_cell(fault.name)} | {_cell(fault.today) or '…'} | {said} | {told['seconds']} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    TABLE.write_text(table(Path(sys.argv[1])), encoding="utf-8")
