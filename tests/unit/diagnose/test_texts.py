"""The tables of texts: every entry is used, with exactly the values that it shows."""

import ast
import string
from collections.abc import Iterator
from pathlib import Path

from torchmuster import diagnose
from torchmuster.diagnose.texts import finding, read_texts
from torchmuster.finding import Status

FIELDS = ("what", "why", "fix", "evidence")


def calls() -> Iterator[tuple[str, set[str]]]:
    """Yield the key and the keyword arguments of every call of ``finding``."""
    folder = Path(next(iter(diagnose.__path__)))
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "finding" and node.args:
                assert isinstance(node.args[0], ast.Constant)
                yield str(node.args[0].value), {str(keyword.arg) for keyword in node.keywords}


def test_every_entry_is_used_with_exactly_its_values() -> None:
    used = set()
    for key, arguments in calls():
        used.add(key)
        entry = read_texts()[key]
        shown = set()
        for field in FIELDS:
            for _, name, _, _ in string.Formatter().parse(entry.get(field, "")):
                shown |= {name} if name else set()
        assert arguments - {"status", "hosts"} == shown, key
        assert "status" in arguments or "status" in entry, key
    assert used == set(read_texts())


def test_a_variant_has_the_name_of_its_finding() -> None:
    found = finding("firewall-on:macos", fix="open", evidence="enabled", hosts=("a",))
    assert (found.name, found.status, found.hosts) == ("firewall-on", Status.NOTE, ("a",))
    assert found.fix == "open"
