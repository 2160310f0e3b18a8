"""Phrases that no text of ours uses; the words to use instead are in CONTRIBUTING.md, "Language"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# Phrase (a regular expression) -> what to write.
BANNED = {
    r"\b(?:is|are|was|were|be) told\b|\btold with\b": "is reported, printed, logged",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\b(?:goes|go|going|went) on from\b": "resumes from, continues from",
    r"\bfinished well\b|\bended well\b": "finished",
    r"\bas asked\b": "name the option: device: cpu",
    r"\bsigns? of life\b": "heartbeat",
    r"\bnumber types?\b": "dtype",
    r"\bwhoever\b": "the caller, the user, another process",
    r"\bmade[ -]up\b(?!-data)": "synthetic",
    r"\bstand-ins?\b": "stub, fake",
    r"\bnothing is said\b|\bsays nothing without\b": "has no effect without",
    r"\bso (?:many|long) (?:ranks|steps|seconds)\b": "N ranks, DURATION",
    r"\b(?:keeper|watchman|guardian|roll-call)s?\b": "node agent, reaper, node registry",
    r"\bmeeting[ -]places?\b": "rendezvous address",
    r"\bthe words? that\b": "the text that",
}
_RULES = {re.compile(phrase, re.IGNORECASE): use for phrase, use in BANNED.items()}


def banned_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield each banned phrase of a text, and what to write instead."""
    for rule, use in _RULES.items():
        for match in rule.finditer(text):
            yield match[0], use


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file with their lines: the strings of Python code, the prose of Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        prose = re.sub(
            r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL
        )
        yield from enumerate(re.sub(r"`[^`\n]*`", "", prose).split("\n"), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"``.*?``", "", node.value, flags=re.DOTALL)
