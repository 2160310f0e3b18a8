"""Private names of torch are used only in the ``torch_private.py`` of a package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torchmuster

SOURCE = Path(torchmuster.__file__).parent
PRIVATE = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*")


def torch_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that begin with ``torch`` in imports, expressions and texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (name.name for name in node.names)
            case ast.ImportFrom():
                yield from (f"{node.module}.{name.name}" for name in node.names)
            case ast.Attribute():
                yield ast.unparse(node)
            case ast.Constant(value=str(text)) if PRIVATE.fullmatch(text):
                yield text


def test_private_names_of_torch_are_in_their_file() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        for name in torch_names(ast.parse(path.read_text(encoding="utf-8"))):
            if PRIVATE.match(name):
                found.append(f"{path.relative_to(SOURCE)}: {name}")
    assert found == []
