#!/usr/bin/env python3
"""Count what a reader of the code meets, per package, and compare it with the ceilings.

scripts/size.py            a table: each figure with its ceiling
scripts/size.py --write    lower the ceilings to today's figures

tests/architecture/ceilings.toml holds the ceilings, tests/architecture/test_size.py compares. A ceiling only goes
down. One may rise in the commit that adds a decided feature, edited by hand, with the reason in a comment beside it.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "torchmuster"
CEILINGS = ROOT / "tests" / "architecture" / "ceilings.toml"
# Modules at the top of the package count as one package.
TOP = "top"
OTHER_FOLDERS = ("tests", "benchmarks", "examples")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
VAGUE_NAMES = frozenset(
    [
        "one",
        "told",
        "asked",
        "words",
        "ways",
        "way",
        "said",
        "kept",
        "meeting",
        "course",
        "voice",
        "everybody",
        "others",
        "look",
    ]
)


def count_tokens(text: str) -> int:
    """Return the number of names, operators, numbers and strings, without comments and docstrings."""
    count = 0
    at_start = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            count += 1
            at_start = False
        elif token.type == tokenize.STRING and not at_start:
            count += 1
        elif token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            at_start = True
    return count


def measure_module(path: Path) -> Counter[str]:
    """Return the counts of one module."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    counts = Counter(modules=1, lines=len(lines), tokens=count_tokens(text))
    counts["code_lines"] = sum(bool(line.strip()) for line in lines)
    counts["late_constants"] = late_constants(tree)
    for node in ast.walk(tree):
        counts["conditionals"] += isinstance(node, ast.IfExp)
        if isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
            counts["nested"] += is_nested(node)
        elif isinstance(node, DEFINITIONS):
            counts["repeated_names"] += repeats_module(node.name, path.stem)
        elif isinstance(node, ast.Name):
            counts["vague_names"] += is_vague(node.id)
        elif isinstance(node, ast.arg):
            counts["vague_names"] += is_vague(node.arg)
    return counts


def late_constants(tree: ast.Module) -> int:
    """Return the number of assignments after the first function or class of a module."""
    count = 0
    defined = False
    for statement in tree.body:
        if isinstance(statement, DEFINITIONS):
            defined = True
        elif defined and isinstance(statement, ast.Assign):
            count += 1
    return count


def is_nested(node: ast.expr) -> bool:
    """Whether a comprehension has several loops or holds another one."""
    return sum(isinstance(child, ast.comprehension) for child in ast.walk(node)) > 1


def repeats_module(name: str, module: str) -> bool:
    """Whether a private name has its module's name in it."""
    return name.startswith("_") and not name.startswith("__") and len(module) > 3 and module in name


def is_vague(name: str) -> bool:
    """Whether a part of a name is one that says nothing."""
    return not VAGUE_NAMES.isdisjoint(name.strip("_").split("_"))


def measure_packages() -> dict[str, dict[str, float]]:
    """Return the figures of each package that the ceilings limit."""
    counts: dict[str, Counter[str]] = {}
    for path in SOURCE.rglob("*.py"):
        folders = path.relative_to(SOURCE).parts[:-1]
        package = folders[0] if folders else TOP
        counts.setdefault(package, Counter()).update(measure_module(path))
    figures = {}
    for package, count in sorted(counts.items()):
        per_line = 1000 / max(1, count["code_lines"])
        figures[package] = {
            "tokens": count["tokens"],
            "modules": count["modules"],
            "tokens_per_line": round(count["tokens"] / max(1, count["lines"]), 2),
            "comprehensions": round(count["comprehensions"] * per_line, 1),
            "nested_comprehensions": round(count["nested"] * per_line, 1),
            "conditional_expressions": round(count["conditionals"] * per_line, 1),
            "vague_names": round(1000 * count["vague_names"] / max(1, count["tokens"]), 1),
            "names_that_repeat_the_module": count["repeated_names"],
            "constants_between_definitions": count["late_constants"],
        }
    return figures


def measure_product() -> dict[str, float]:
    """Return the number of commands, flag names and settings, and the tokens of all packages and other folders."""
    from torchmuster.cli.main import root_parser
    from torchmuster.config import fields

    commands = 0
    flags = set()
    for parser in all_parsers(root_parser()):
        commands += len(parser.prog.split()) == len(["muster", "COMMAND"])
        for action in parser._actions:
            flags.update(name for name in action.option_strings if name.startswith("--"))
    figures: dict[str, float] = {
        "commands": commands,
        "flags": len(flags),
        "settings": len(fields.leaves()),
        "tokens": folder_tokens(SOURCE),
        "modules": len(list(SOURCE.rglob("*.py"))),
    }
    for folder in OTHER_FOLDERS:
        figures[f"{folder}_tokens"] = folder_tokens(ROOT / folder)
    return figures


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from all_parsers(command)


def folder_tokens(folder: Path) -> int:
    """Return the tokens of all Python files of a folder."""
    return sum(count_tokens(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def measure() -> dict[str, dict[str, float]]:
    """Return all figures: those of the product, then those of each package."""
    return {"product": measure_product(), **measure_packages()}


def too_high(figures: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each figure above its ceiling, and for each package without ceilings."""
    ceilings = read_ceilings()
    lines = []
    for package, values in figures.items():
        limits = ceilings.get(package)
        if limits is None:
            lines.append(f"{package} has no ceilings: add them to {CEILINGS.name}")
            continue
        for name, value in values.items():
            if value > limits[name]:
                lines.append(f"{package}: {name} is {value:,}, its ceiling {limits[name]:,}")
    return lines


def read_ceilings() -> dict[str, dict[str, float]]:
    """Return the ceilings by package and figure."""
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def write_ceilings(figures: dict[str, dict[str, float]]) -> None:
    """Lower each ceiling to today's figure, keep the comments, and remove the packages that are gone."""
    head, *sections = CEILINGS.read_text(encoding="utf-8").split("\n[")
    parts = [head.rstrip()]
    for section in sections:
        package, _, lines = section.partition("]\n")
        values = figures.get(package)
        if values is not None:
            parts.append(f"\n[{package}]\n{lowered(lines, values).rstrip()}")
    for package in [package for package in figures if package not in read_ceilings()]:
        lines = [f"{name} = {value}" for name, value in figures[package].items()]
        parts.append("\n".join([f"\n[{package}]", *lines]))
    CEILINGS.write_text("\n".join(parts) + "\n", encoding="utf-8")


def lowered(lines: str, values: dict[str, float]) -> str:
    """Return the lines of a package with each ceiling at most as high as its figure."""

    def lower(match: re.Match[str]) -> str:
        name, ceiling = match["name"], match["ceiling"]
        value = values[name]
        return f"{name} = {value}" if value < float(ceiling) else match[0]

    return re.sub(r"^(?P<name>\w+) = (?P<ceiling>[\d.]+)", lower, lines, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Print the figures with their ceilings; with --write, lower the ceilings first."""
    figures = measure()
    if arguments == ["--write"]:
        write_ceilings(figures)
    ceilings = read_ceilings()
    for package, values in figures.items():
        print(package)
        for name, value in values.items():
            print(f"  {name:30} {value:>9,}  ceiling {ceilings.get(package, {}).get(name, 0):>9,}")
    complaints = too_high(figures)
    print("\n".join(complaints))
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
