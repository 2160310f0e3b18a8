"""Which module imports what, read from the source; and the order of the house."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torchmuster"

# The level of each room; a room may import rooms of lower levels only. Files of level 0 are the
# vocabulary, which may import each other.
LEVELS = {
    "errors": 0,
    "finding": 0,
    "decision": 0,
    "units": 0,
    "runfolder": 0,
    "redaction": 0,
    "untrusted": 0,
    "torch_internals": 0,
    "config": 1,
    "devices": 1,
    "checkpoints": 1,
    "known_errors": 1,
    "pages": 1,
    "integrations": 1,
    "launch": 2,
    "monitor": 3,
    "diagnose": 3,
    "train": 3,
    "plan": 4,
    "bench": 5,
    "prove": 5,
    "labs": 5,
    "selftest": 5,
    "worker": 6,
    "notebook": 6,
    "distributed": 6,
    "cli": 6,
    "__main__": 7,
}
# Where torch may be imported at all, and where only inside functions.
TORCH_ROOMS = {"train", "worker"}
TORCH_FOLDERS = {"probes", "lessons"}
TORCH_INSIDE_FUNCTIONS = {"distributed", "notebook"}
# What runs inside torchrun's agent, and the private names of torch that probes use.
TORCH_FILES = {
    "launch/node/static_rendezvous.py",
    "labs/torch_private.py",
    "plan/torch_private.py",
    "selftest/torch_private.py",
}
TORCH_FILES_INSIDE_FUNCTIONS = {"launch/node/elastic_agent.py"}
VOCABULARY_MAY_IMPORT = "the standard library"


@dataclass(frozen=True)
class Import:
    """One import statement."""

    path: Path
    line: int
    module: str
    at_top: bool


def room_of(path: Path, root: Path) -> str:
    """Return the room a file belongs to: a folder of the package, or a file at its top."""
    first = path.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path, *, for_types: bool = False) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions; those for type checkers only if asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    only_for_types = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.dump(outer.test)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if id(node) in only_for_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(path, node.lineno, name.name, id(node) not in functions)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            for name in node.names:
                yield Import(path, node.lineno, f"{module}.{name.name}", id(node) not in functions)


def broken_rules(root: Path) -> list[str]:
    """Return a sentence for every import that breaks the order of the house."""
    found = []
    for path in sorted(root.rglob("*.py")):
        room = room_of(path, root)
        if room == "__init__":
            # %load_ext calls a function of the package itself, which may import what it needs.
            at_top = [one for one in imports_of(path) if one.at_top]
            found += [f"{path}: the package itself imports nothing" for _ in at_top]
            continue
        if room not in LEVELS:
            found.append(f"{path}: room {room!r} has no level; add it to the order of the house")
            continue
        found += [text for one in imports_of(path) if (text := _broken(one, room))]
    return found


def _broken(one: Import, room: str) -> str:
    where = f"{one.path}:{one.line}"
    top, _, rest = one.module.partition(".")
    if not top:
        return f"{where}: relative import; write torchmuster.… so that the level can be seen"
    if top == "torch":
        file = one.path.as_posix()
        in_torch_room = (
            room in TORCH_ROOMS
            or TORCH_FOLDERS & set(one.path.parts)
            or file.endswith(tuple(TORCH_FILES))
        )
        inside_function = not one.at_top and (
            room in TORCH_INSIDE_FUNCTIONS or file.endswith(tuple(TORCH_FILES_INSIDE_FUNCTIONS))
        )
        return (
            "" if in_torch_room or inside_function else f"{where}: torch must not be imported here"
        )
    if top != PACKAGE:
        return ""
    target = rest.partition(".")[0]
    if target == room or target not in LEVELS:
        return ""
    lower = LEVELS[target] < LEVELS[room] or LEVELS[target] == LEVELS[room] == 0
    return (
        ""
        if lower
        else f"{where}: {room} (level {LEVELS[room]}) imports {target} (level {LEVELS[target]})"
    )


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules below ``root`` and which of them each imports, in functions and for types too."""
    paths = {_module_name(path, root): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = [one.module for one in imports_of(path, for_types=True)]
        found = {one if one in paths else one.rpartition(".")[0] for one in named}
        graph[module] = found & paths.keys() - {module}
    return graph


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle; nothing if there is no such circle."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if cycle := visit(imported, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])
