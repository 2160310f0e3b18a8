"""The page of error texts, written from the rules that explain them and from the texts they were tried on."""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from torchmuster.known_errors.explain import SUBJECTS, clean_text, explain_text
from torchmuster.known_errors.rule import Rule, expression, in_small_letters

# Only the texts that rules may be written from: the others are there to be counted, not to be looked at.
TEXTS = Path(__file__).resolve().parents[2] / "tests/unit/known_errors/corpus/open.yaml"
SHOWN, LONGEST = 3, 160  # texts for each cause, and characters of one

HEAD = """\
# Error texts, and what mends them

Search this page (Ctrl-F) for a few words of what was printed. Numbers, addresses and versions in it do not matter. Or let it
be searched for: `muster doctor --explain - < error.log` reads a whole log, tells the cause from what only follows from it,
and puts your addresses and ports into the commands ([Explain](../explain.md)).

Words in capitals, such as `PORT`, are for you to fill in. The texts are quoted from public threads, which are named beside
them.
"""


def page() -> str:
    """Return the page: a section for each subject, in it each cause with texts, how to make sure, what mends it."""
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
    """Return the lines by which texts were recognised, with their threads, for each rule that explained one first."""
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
    lines.append(f"To make sure:\n\n```text\n{_filled(rule.confirm)}\n```\n")
    lines.append(f"To mend it:\n\n```text\n{_filled(rule.fix)}\n```\n")
    return "\n".join(lines)


def _different(texts: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Choose texts that begin differently, the shortest first."""
    beginnings: set[str] = set()
    for line, source in sorted(texts, key=lambda one: (len(one[0]), one[0])):
        if len(line) >= 12 and line[:25] not in beginnings and len(beginnings) < SHOWN:
            beginnings.add(line[:25])
            yield line, source


def _words(rule: Rule) -> Iterator[str]:
    """Return those patterns of a rule that a reader would recognise: they are words, and nothing else."""
    for pattern in rule.patterns:
        if not re.search(r"[\[\](){}|?*+^$\\]", re.sub(r"\\[^\w\s]", "", pattern)):
            yield re.sub(r"\\([^\w\s])", r"\1", pattern)


def _link(source: str) -> str:
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def _filled(text: str) -> str:
    """Put words in capitals where an error's own details would stand."""
    words = re.sub(r"\{([a-z]+)\}", lambda one: one[1].upper(), text.replace("{host}", "HOST"))
    return words.strip()


def _plain(text: str) -> str:
    """Return prose as Markdown shows it: nothing in it is markup."""
    filled = _filled(text.replace("{host}", "the host"))
    for sign in "\\`*_<>[]$":
        filled = filled.replace(sign, "\\" + sign)
    sentence = " ".join(filled.split()).rstrip(".")
    return sentence[:1].upper() + sentence[1:]
