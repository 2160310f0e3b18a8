"""Write the table of faults in the documentation from the records of the catalogue's tests.

To renew benchmarks/results/faults.md::

    CATALOGUE_RECORDS=build/catalogue python -m pytest -n 0 tests/hosts/test_catalogue.py
    PYTHONPATH=tests python tests/hosts/catalogue_table.py build/catalogue
"""

import json
import sys
from pathlib import Path

from hosts.catalogue import GROUPS, Catalogued

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.md"
HEAD = """# Fault catalogue of `muster check`

Each fault was injected on two to four hosts (network namespaces), and `muster check` ran on the first host, on two cores. *Applied* means that the
test ran the command of the fix, and the next check no longer found the fault. The second column shows what torch 2.13 prints for the same fault
without Muster; … means that this was not observed. [Fault catalogue](../../docs/tested.md#fault-catalogue) describes the method, and lists the faults
that could not be injected. Written by `tests/hosts/catalogue_table.py`.

"""


def record_of(fault: Catalogued, folder: Path) -> Path:
    """Return the path of a fault's record."""
    return folder / f"{fault.name.replace('/', '-').replace(' ', '-')}.json"


def table(records: Path) -> str:
    """Return the page; every fault must have been tested."""
    parts = []
    for title, faults in GROUPS.items():
        rows = [_row(fault, records) for fault in faults]
        parts.append(f"## {title}\n\n| fault | plain torchrun | `muster check` | seconds |")
        parts.append("|---|---|---|---|")
        parts += [*rows, ""]
    return HEAD + "\n".join(parts)


def _row(fault: Catalogued, records: Path) -> str:
    record = json.loads(record_of(fault, records).read_text())
    lines = [line.strip() for line in record["fix"].splitlines() if line.strip()]
    ran = fault.mended_by.line if fault.mended_by else ""
    fix = next((line for line in lines if not line.endswith(":") and ran in line), "")
    applied = "; applied, and the next check was clean" if ran else ""
    found = f"`{record['finding']}`: {_cell(record['what'])}. Fix: `{_cell(fix)}`{applied}"
    return f"| {_cell(fault.name)} | {_cell(fault.today) or '…'} | {found} | {record['seconds']} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    TABLE.write_text(table(Path(sys.argv[1])), encoding="utf-8")
