"""How far values travel through the code: how many functions take an object, and in how many files.

python benchmarks/journeys.py [--root CHECKOUT]

Counts the functions of ``src/`` that have a parameter annotated with a type, read from the source. Compare two checkouts with ``--root``.
"""

import argparse
import ast
from pathlib import Path

# What travels: the names of its type, now and before it was renamed.
VALUES = {
    "job spec": {"JobSpec"},
    "settings": {"Settings", "Resolved"},
    "plan request": {"PlanRequest", "Asked"},
    "node": {"NodeHandle", "Node", "RollCall", "NodeRegistry"},
    "checkpoint store": {"Store", "Checkpointer"},
}


def main() -> None:
    """Print the table of one checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    source = parser.parse_args().root / "src" / "torchmuster"
    files = sorted(source.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    print(f"{len(files)} modules, {lines:,} lines")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    print(f"{'value':20} {'functions':>9} {'files':>6}")
    for value, types in VALUES.items():
        found = [path for path, tree in trees.items() for _ in _taking(tree, types)]
        print(f"{value:20} {len(found):9} {len(set(found)):6}")


def _taking(tree: ast.AST, types: set[str]) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(
            name.id in types
            for argument in ast.walk(node.args)
            if isinstance(argument, ast.arg) and argument.annotation is not None
            for name in ast.walk(argument.annotation)
            if isinstance(name, ast.Name)
        )
    ]


if __name__ == "__main__":
    main()
