"""The page of error texts, generated from the rules that explain them and the texts they are tested on."""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from torchmuster.known_errors.explain import SUBJECTS, clean_text, explain_text
from torchmuster.known_errors.rule import Rule, expression, in_small_letters

# Only the texts that rules may be written from; the others are for counting.
TEXTS = Path(__file__).resolve().parents[2] / "tests/unit/known_errors/corpus/open.yaml"
SHOWN, LONGEST = 3, 160  # texts for each cause, and characters of one

HEAD = """\
# Error texts and their fixes

Search this page (Ctrl-F) for part of the message; numbers, addresses and versions do not matter. Or let muster search:
`muster doctor --explain - < error.log` reads a whole log, separates the root cause from errors that follow from it, and fills your
addresses and ports into the commands ([Explain](../troubleshooting.md#explain-a-failed-run-or-an-error)).

Replace names in capitals, such as `PORT`. The messages are quoted from the public threads that are linked below them.
"""


def page() -> str:
    """Return the page: a section for each subject, in it each cause with texts, how to confirm it, how to fix it."""
    seen = _texts_by_rule()
    parts = [HEAD]
    for subject in SUBJECTS:
        file = importlib.import_module(f"torchmuster.known_errors.{subject}")
        title = (file.__doc__ or subject).partition("\n")[0].rstrip(".")
        parts.append(f"## {title}\n")
        for number, rule in enumerate(file.RULES):
            parts.append(_section(rule, seen.get((subject, number), [])))
    return "\n".join(parts)


def _texts_by_rule() -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Return the lines by which texts were recognized, with their threads, for each rule that explained one first."""
    found: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for case in YAML(typ="safe").load(TEXTS.read_text(encoding="utf-8")):
        explanations = explain_text(case["text"])
        if not explanations or explanations[0].name != case["cause"]:
            continue
        line = explanations[0].evidence.strip()[:LONGEST]
        # As it stands alone it must lead to the same cause: that is what a reader will compare.
        alone = explain_text(line)
        if alone and alone[0].name == case["cause"]:
            place = _rule_for(case["cause"], line)
            if place is not None:
                found.setdefault(place, []).append((line, case["source"]))
    return found


def _rule_for(name: str, line: str) -> tuple[str, int] | None:
    text = in_small_letters(clean_text(line))
    for subject in SUBJECTS:
        file = importlib.import_module(f"torchmuster.known_errors.{subject}")
        for number, rule in enumerate(file.RULES):
            known = any(expression(words).search(text) for words in rule.patterns)
            if (
                rule.name == name
                and known
                and not any(expression(words).search(text) for words in rule.unless)
            ):
                return subject, number
    return None


def _section(rule: Rule, texts: list[tuple[str, str]]) -> str:
    lines = [f"### {rule.name}\n", f"{_plain(rule.what)}.\n"]
    if chosen := list(_different(texts)):
        shown = "\n".join(line for line, _ in chosen)
        threads = ", ".join(_link(source) for _, source in chosen)
        lines += [f"```text\n{shown}\n```\n", f"Seen in {threads}.\n"]
    elif words := list(itertools.islice(_words(rule), SHOWN)):
        lines += ["```text\n" + "\n".join(words) + "\n```\n"]
    if rule.why:
        lines.append(f"Why: {_plain(rule.why)}.\n")
    lines.append(f"Confirm:\n\n```text\n{_filled(rule.confirm)}\n```\n")
    lines.append(f"Fix:\n\n```text\n{_filled(rule.fix)}\n```\n")
    return "\n".join(lines)


def _different(texts: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Choose texts that begin differently, the shortest first."""
    beginnings: set[str] = set()
    for line, source in sorted(texts, key=lambda one: (len(one[0]), one[0])):
        if len(line) >= 12 and line[:25] not in beginnings and len(beginnings) < SHOWN:
            beginnings.add(line[:25])
            yield line, source


def _words(rule: Rule) -> Iterator[str]:
    """Return the patterns of a rule that are plain text."""
    for pattern in rule.patterns:
        if not re.search(r"[\[\](){}|?*+^$\\]", re.sub(r"\\[^\w\s]", "", pattern)):
            yield re.sub(r"\\([^\w\s])", r"\1", pattern)


def _link(source: str) -> str:
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def _filled(text: str) -> str:
    """Replace the details of an error by their names in capitals."""
    words = re.sub(r"\{([a-z]+)\}", lambda one: one[1].upper(), text.replace("{host}", "HOST"))
    return words.strip()


def _plain(text: str) -> str:
    """Return prose as Markdown shows it: nothing in it is markup."""
    filled = _filled(text.replace("{host}", "the host"))
    for sign in "\\`*_<>[]$":
        filled = filled.replace(sign, "\\" + sign)
    sentence = " ".join(filled.split()).rstrip(".")
    return sentence[:1].upper() + sentence[1:]
