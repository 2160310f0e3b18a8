"""Divide the cases into those that rules may be written from and those that only score them.

    python split.py CASES.yaml

The cases are sorted by the SHA-256 of their texts; every third goes to ``held_out.yaml``, the others to
``open.yaml``. The order depends on nothing but the texts, so nobody chose which case went where.
"""

import hashlib
import re
import sys
from pathlib import Path

from ruamel.yaml import YAML

FOLDER = Path(__file__).parent
HEADINGS = {
    "open.yaml": "# Cases to write rules from. README.md says what they are.\n",
    "held_out.yaml": "# Cases that only score the rules: do not look at them while writing one.\n",
}


def known_causes() -> set[str]:
    """Return the names that ``causes.md`` lists."""
    return {
        *re.findall(r"^\| `([a-z0-9-]+)`", (FOLDER / "causes.md").read_text(), re.MULTILINE),
        "unknown",
    }


def checked(cases: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the cases, or end with what is wrong with them."""
    wrong = [
        f"{case['source']}: {case['cause']}?"
        for case in cases
        if case["cause"] not in known_causes()
    ]
    if len({" ".join(case["text"].split()) for case in cases}) < len(cases):
        wrong.append("a text is there twice")
    if wrong:
        sys.exit("\n".join(wrong))
    return cases


def written(case: dict[str, str]) -> str:
    """Return a case as YAML, its text as a literal block."""
    lines = case["text"].splitlines()
    block = "|2-" if lines[0].startswith(" ") else "|-"
    body = "".join(f"    {line}\n" if line else "\n" for line in lines)
    return f"- cause: {case['cause']}\n  source: {case['source']}\n  text: {block}\n{body}"


def main(path: str) -> None:
    """Write the two files next to this one."""
    cases = checked(YAML(typ="safe").load(Path(path)))
    cases.sort(key=lambda case: hashlib.sha256(case["text"].encode()).hexdigest())
    for name, part in (
        ("open.yaml", [case for place, case in enumerate(cases) if place % 3 != 2]),
        ("held_out.yaml", cases[2::3]),
    ):
        (FOLDER / name).write_text(HEADINGS[name] + "".join(map(written, part)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
