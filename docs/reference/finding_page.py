"""The page of findings, generated from the code that creates them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src/torchmuster"
# The command, and the folders or files that create its findings; the first match counts.
WHO = {
    "`muster doctor`, and `muster check` on each host": ("diagnose/machine",),
    "`muster hang`": ("diagnose/hang",),
    "`muster check`": ("diagnose", "launch/launcher/compare_nodes.py", "launch/network"),
    "`muster gpus`": ("devices", "cli/gpus.py"),
    "`muster run` and `muster explain`": ("launch",),
    "`muster train`": ("train", "worker"),
    "`muster plan`": ("plan",),
    "`muster bench` and `muster profile`": ("bench",),
}

HEAD = """\
# Findings and their fixes

Every check reports findings: a name, a status, what is true, why, and how to fix it. Names are stable; `--json` prints them. Only a
finding with status failure makes a command fail ([exit codes](../exit-codes.md)). In this table, `…` stands for a host, a number or a
path that is known only at run time.

For error texts of torch, NCCL, ssh and others, see [Error texts](errors.md).
"""


@dataclass(frozen=True, order=True)
class Found:
    """A finding as the code words it."""

    name: str
    status: str
    what: str
    fix: str


def page() -> str:
    """Return the page."""
    parts, left = [HEAD], sorted(SOURCE.rglob("*.py"))
    for who, places in WHO.items():
        files = [one for one in left if _is_in(one, places)]
        left = [one for one in left if one not in files]
        rows = {one.name: one for file in reversed(files) for one in reversed(list(findings(file)))}
        if rows:
            parts.append(f"## {who}\n\n| name | | what | fix |\n|---|---|---|---|")
            parts += [_row(rows[name]) for name in sorted(rows)]
            parts.append("")
    return "\n".join(parts)


def _is_in(file: Path, places: tuple[str, ...]) -> bool:
    path = str(file.relative_to(SOURCE))
    return any(path == place or path.startswith(f"{place}/") for place in places)


def findings(file: Path) -> Iterator[Found]:
    """Find what a file makes of findings that are worth telling, by their names."""
    text = file.read_text(encoding="utf-8")
    if "Finding(" not in text:
        return
    tree = ast.parse(text)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            given = {one.arg: one.value for one in node.keywords if one.arg}
            for words in _cases(given):
                status = getattr(words.get("status"), "attr", "")
                if status in ("FAILURE", "WARNING", "NOTE"):
                    texts = [_text(words.get(part), constants) for part in ("what", "fix")]
                    for name in _names(words.get("name"), constants):
                        yield Found(name, status.lower(), *texts)


def _cases(words: dict[str, ast.expr]) -> Iterator[dict[str, ast.expr]]:
    """Yield what a finding is made of, for each name that it may have."""
    name = words.get("name")
    if not isinstance(name, ast.IfExp):
        yield words
        return
    test = ast.dump(name.test)
    for case in ("body", "orelse"):
        yield from _cases(
            {
                part: getattr(value, case)
                if isinstance(value, ast.IfExp) and ast.dump(value.test) == test
                else value
                for part, value in words.items()
            }
        )


def _names(node: ast.expr | None, constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):  # one of a table
        table = constants.get(node.value.id)
        for value in table.values if isinstance(table, ast.Dict) else ():
            yield from _names(value, constants)
    elif isinstance(node, ast.Constant | ast.JoinedStr):
        yield _text(node, {})


def _text(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """Return what a text says, with … for what is computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(one, constants) for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.IfExp):
        return _text(node.body, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        known = isinstance(inner, ast.Name) and inner.id in constants
        return _text(inner, constants) if known else "…"
    return "" if node is None else "…"


def _row(found: Found) -> str:
    what, fix = found.what.strip(), found.fix.strip()
    shown = "<br>".join(_code(line) for line in fix.splitlines() if line.strip(" …"))
    return f"| `{found.name}` | {found.status} | {_prose(what)} | {shown or 'printed with the finding'} |"


def _code(line: str) -> str:
    fence = "``" if "`" in line else "`"
    return f"{fence}{line.strip()}{fence}".replace("|", "\\|")


def _prose(text: str) -> str:
    if not text.strip("… "):
        return "printed with the finding"
    for sign in "\\`*_<>[]|$":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split()).replace("……", "…") or "printed with the finding"
