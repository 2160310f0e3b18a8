"""Which private names of torch the source uses, and where; read from the source, without torch."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.torch_internals import PrivateName

FILE = "torch_private.py"
# Private names that are not torch's.
_NOT_TORCHS = {
    "_ActionsContainer": "argparse, in types",
    "_DummyThread": "threading",
    "_current_frames": "sys",
    "_exit": "os",
    "_ex_iterable": "datasets",
    "_fields": "named tuples",
    "_formatting": "datasets",
    "_option_string_actions": "argparse",
    "_per_second": "transformers, in names of metrics",
    "_preparation_time": "transformers, in names of metrics",
    "_replace": "named tuples",
    "_runtime": "transformers, in names of metrics",
    "_v2": "NVML",
    "_v3": "NVML",
}
_ASK_FOR_A_PART = ("startswith", "endswith", "removeprefix", "removesuffix")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*")


@dataclass(frozen=True)
class Use:
    """A private name that is used in a file, as far as the file says what it belongs to."""

    path: Path
    line: int
    name: str

    @property
    def last(self) -> str:
        """The private part: the last one that begins with an underscore."""
        return next(one for one in reversed(self.name.split(".")) if is_private(one))


def is_private(name: str) -> bool:
    """Say whether a name begins with one underscore."""
    return _PRIVATE.fullmatch(name) is not None


def uses(path: Path) -> Iterator[Use]:
    """Yield the private names that a file uses and that are not known to be its own or another library's.

    What an object is cannot be seen here. So every private name counts that the file neither defines nor takes from this
    package: imports, attributes, and strings that are such a name or a path to one.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    known = _defined(nodes) | _NOT_TORCHS.keys()
    imported = dict(_imported(nodes))
    table = _table(tree)
    left_out = {id(node) for node in ast.walk(table)} if table is not None else set()
    left_out |= set(_parts_of_names(nodes))
    for node in nodes:
        if id(node) in left_out or not isinstance(node, ast.stmt | ast.expr):
            continue
        for name in _names(node, imported):
            private = [part for part in name.split(".") if is_private(part)]
            if private and (name.startswith("torch.") or not known.issuperset(private)):
                yield Use(path, node.lineno, name)


def _names(node: ast.AST, imported: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if one.name.partition(".")[0] == "torch")
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        yield from (f"{node.module}.{one.name}" for one in node.names)
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        owner = _path(node.value, imported)
        if owner.partition(".")[0] == "torch":
            yield f"{owner}.{node.attr}"
        elif not owner.startswith("torchmuster"):
            yield node.attr
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (is_private(node.value) or _PRIVATE_PATH.fullmatch(node.value))
    ):
        yield node.value


def _parts_of_names(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the strings that are only a part of a name: in f-strings, and what a name is asked to begin or end with."""
    for node in nodes:
        parts: list[ast.expr] = []
        if isinstance(node, ast.JoinedStr):
            parts = node.values
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args if node.func.attr in _ASK_FOR_A_PART else []
        yield from map(id, parts)


def _path(node: ast.expr, imported: Mapping[str, str]) -> str:
    """Return what an expression is called from outside; "" where it is not simply a name."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _path(node.value, imported)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _imported(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that a file gives to something imported, or to a part of it, with where it comes from."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            path = _path(node.value, {})  # _aten = torch.ops.aten
            if path.startswith("torch."):
                yield node.targets[0].id, path


def _defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables, and attributes of its objects."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                found.add(node.attr)
    return found


def _table(tree: ast.Module) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMES":
            return node.value
    return None


def declared(path: Path) -> list[PrivateName]:
    """Return the table of a ``torch_private.py``."""
    table = _table(ast.parse(path.read_text(encoding="utf-8")))
    assert isinstance(table, ast.Tuple), f"{path} has no table NAMES"
    found = []
    for entry in table.elts:
        assert isinstance(entry, ast.Call), f"{path}:{entry.lineno}: not a PrivateName"
        given = [ast.literal_eval(one) for one in entry.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in entry.keywords}
        found.append(PrivateName(*given, **named))
    return found
