"""Texts that users and contributors read use the field's words."""

from pathlib import Path

import pytest

import torchmuster
from architecture.plain_english import banned_in, texts_of

PACKAGE = Path(torchmuster.__file__).parent
ROOT = PACKAGE.parents[1]
# Recorded output, and the list of old names.
NOT_OURS = {"docs/renamed-modules.md", "CHANGELOG.md"}


def test_no_text_has_a_banned_phrase() -> None:
    generated = [
        *(ROOT / "docs" / "generated").glob("*.md"),
        *(ROOT / "docs/reference").glob("*.py"),
    ]
    pages = [*(ROOT / "docs").glob("*.md"), *generated, *ROOT.glob("*.md"), *PACKAGE.rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}; write: {use}"
        for path in [*PACKAGE.rglob("*.py"), *pages]
        if str(path.relative_to(ROOT)) not in NOT_OURS
        for line, text in texts_of(path)
        for phrase, use in banned_in(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["A hang is told, not ended", "which command mends it?", "float32 is a number type"]
)
def test_a_banned_phrase_is_found(text: str) -> None:
    assert list(banned_in(text))
