"""The tests that tests/README.md names for each promise exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_promise_has_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 70
    missing = []
    for file, name in named:
        path = TESTS / file
        if not path.exists() or f"def {name}(" not in path.read_text():
            missing.append(f"{file}::{name}")
    assert missing == []
