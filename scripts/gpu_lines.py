"""List the lines of Muster that run only with an accelerator, and how many of them the tests execute.

    python scripts/gpu_lines.py [PATH …] [--coverage FILE]

The rules read the source only, of files that import torch and of readers of GPUs. A test of an ``if`` is evaluated as on a host without an accelerator, to true, false or
unknown:

- a comparison with "cuda", "xpu", "mps", "hip", "rocm", "nccl" or "xccl": not equal;
- a comparison of ``….type``, ``kind``, ``kernels`` or ``accelerator`` with "cpu", or of ``backend`` with "gloo": equal;
- ``torch.cuda.is_available()``, ``is_initialized()``, ``current_accelerator()``, ``torch.version.cuda``,
  ``torch.version.hip``: false;
- names and attributes that the file sets to one of these, and everything named ``on_host`` or ``on_cpu``.

Rules for lines:

``branch``    the branch of an ``if`` or ``match`` that such a host does not take
``rest``      what follows a branch that such a host takes and that leaves the block
``call``      the innermost block with a call that needs a device: ``torch.cuda``, ``torch.xpu`` or ``torch.accelerator``
              (except the questions above), ``torch.get_device_module``, ``torch.Event``, ``torch.Stream``
``callers``   a private function that is used only in such lines of its file
``reader``    the functions of the files that read GPUs through a vendor's library or driver
``part``      a conditional expression with a part for accelerators, on the same line as its other part: coverage of
              lines cannot show which part ran, so these lines are counted separately

A rule may be too wide (``torch.get_device_module`` accepts a CPU), and misses what another file decides.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[1]
ACCELERATORS = {"cuda", "xpu", "mps", "hip", "rocm", "nccl", "xccl"}
CPU_OF = {"type": "cpu", "kind": "cpu", "kernels": "cpu", "accelerator": "cpu", "backend": "gloo"}
QUESTIONS = {"is_available", "is_initialized", "current_accelerator", "device_count"}
ON_CPU = {"on_host", "on_cpu"}
MODULES = ("torch.cuda", "torch.xpu", "torch.accelerator")
CALLS = {"torch.get_device_module", "torch.Event", "torch.Stream"}
READERS = (
    *("devices/readers/amd", "devices/readers/apple", "devices/readers/intel"),
    *("devices/readers/nvml", "devices/readers/sysfs", "devices/cuda_driver"),
)

Block: TypeAlias = list[ast.stmt]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class GpuLines:
    """The lines of a file that need an accelerator, each with its rule."""

    rules: dict[int, str] = field(default_factory=dict)
    _truth: dict[str, bool] = field(default_factory=dict)

    def mark(self, nodes: Sequence[ast.AST], rule: str) -> None:
        """Mark the lines of nodes; the first rule of a line stays."""
        for node in nodes:
            for line in range(_first_line(node), node.end_lineno + 1):  # type: ignore[attr-defined]
                self.rules.setdefault(line, rule)

    def read(self, source: str, path: str = "") -> None:
        """Apply all rules to a file."""
        tree = ast.parse(source)
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        if any(reader in path for reader in READERS):
            for function in functions:
                self.mark(_body(function), "reader")
        elif not _imports_torch(tree):
            return
        self._read_names(tree)
        for block in _blocks(tree):
            self._read_block(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                self._read_expression(node)
        used: dict[str, set[int]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                used.setdefault(_last_name(node), set()).add(node.lineno)
        before = -1
        while before != (before := len(self.rules)):
            for function in functions:
                self._read_callers(function, used.get(function.name, set()))

    def ranges(self) -> Iterator[tuple[int, int, str]]:
        """Yield the first line, last line and rule of each run of lines."""
        first = last = 0
        for line in sorted(self.rules):
            if first and line == last + 1 and self.rules[line] == self.rules[first]:
                last = line
                continue
            if first:
                yield first, last, self.rules[first]
            first = last = line
        if first:
            yield first, last, self.rules[first]

    def _read_names(self, tree: ast.AST) -> None:
        """Find names and attributes that always have the same truth without an accelerator."""
        found: dict[str, set[bool | None]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(
                node.targets[0], ast.Name | ast.Attribute
            ):
                name = _last_name(node.targets[0])
                found.setdefault(name, set()).add(self.truth(node.value))
        for name, truths in found.items():
            truth = truths.pop()
            if truth is not None and not truths:
                self._truth[name] = truth

    def truth(self, test: ast.expr) -> bool | None:
        """Return the truth of an expression on a host without an accelerator, or None."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                decides = isinstance(op, ast.Or)  # true decides an or, false an and
                truths = [self.truth(value) for value in values]
                if decides in truths:
                    return decides
                return None if None in truths else not decides
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compare(left, op, right)
            case ast.Call(func=ast.Attribute(attr=name) as func) if name in QUESTIONS:
                return False if _dotted(func).startswith(MODULES) else None
            case ast.Attribute() if _dotted(test) in ("torch.version.cuda", "torch.version.hip"):
                return False
            case ast.Name() | ast.Attribute():
                name = _last_name(test)
                return True if name.strip("_") in ON_CPU else self._truth.get(name)
        return None

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        equal: bool | None = None
        if isinstance(right, ast.Constant) and right.value is None:
            truth = self.truth(left)
            equal = None if truth is None else not truth
        else:
            names = _texts(right)
            if names and names <= ACCELERATORS:
                equal = False
            elif CPU_OF.get(_last_name(left).strip("_"), "") in names:
                equal = True
        if equal is None:
            return None
        return equal if isinstance(op, ast.Eq | ast.Is | ast.In) else not equal

    def _read_block(self, block: Block) -> None:
        for place, statement in enumerate(block):
            taken: Block | None = None
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test)
                if truth is not None:
                    never = statement.orelse if truth else statement.body
                    taken = statement.body if truth else statement.orelse
                    self.mark(never, "branch")
            elif isinstance(statement, ast.Match) and _last_name(statement.subject) in CPU_OF:
                self._read_match(statement)
            if taken and _leaves(taken):
                self.mark(block[place + 1 :], "rest")
            is_new = statement.lineno not in self.rules
            if is_new and any(_needs_device(node) for node in _own_nodes(statement)):
                self.mark(block, "call")

    def _read_match(self, statement: ast.Match) -> None:
        cpu, seen = CPU_OF[_last_name(statement.subject)], False
        for case in statement.cases:
            names = {
                node.value for node in ast.walk(case.pattern) if isinstance(node, ast.Constant)
            }
            if seen or (names and cpu not in names):
                self.mark(case.body, "branch")
            seen = seen or cpu in names

    def _read_expression(self, node: ast.IfExp) -> None:
        truth = self.truth(node.test)
        if truth is None:
            return
        never, other = (node.orelse, node.body) if truth else (node.body, node.orelse)
        lines = range(never.lineno, (never.end_lineno or never.lineno) + 1)
        shared = {node.test.lineno, node.test.end_lineno, other.lineno, other.end_lineno}
        if isinstance(never, ast.Constant) and isinstance(other, ast.Constant):
            return  # such as the label "CPU" or "GPU"
        self.mark([never], "part" if shared & set(lines) else "branch")

    def _read_callers(self, function: Function, used: set[int]) -> None:
        """Mark a private function that only marked lines use."""
        if not function.name.startswith("_") or function.name.startswith("__"):
            return
        outside = used - set(range(function.lineno, (function.end_lineno or 0) + 1))
        if outside and all(self.rules.get(line, "part") != "part" for line in outside):
            self.mark(_body(function), "callers")


def _imports_torch(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.partition(".")[0] == "torch" for name in names):
            return True
    return False


def _first_line(node: ast.AST) -> int:
    lines: list[int] = [node.lineno]  # type: ignore[attr-defined]
    lines += [one.lineno for one in getattr(node, "decorator_list", ())]
    return min(lines)


def _body(function: Function) -> Block:
    """Return the statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _blocks(tree: ast.AST) -> Iterator[Block]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield _body(node) if isinstance(node, Function) else node.body
            continue
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that are not in a block of it, nor in a branch of an expression."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case | ast.Lambda):
                continue
            if isinstance(node, ast.IfExp | ast.BoolOp) and child is not _begins(node):
                continue
            waiting.append(child)


def _begins(node: ast.IfExp | ast.BoolOp) -> ast.expr:
    return node.test if isinstance(node, ast.IfExp) else node.values[0]


def _needs_device(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = _dotted(node.func)
    if name in CALLS:
        return True
    return (
        name.startswith(tuple(f"{one}." for one in MODULES))
        and _last_name(node.func) not in QUESTIONS
    )


def _leaves(block: Block) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def _last_name(node: ast.AST) -> str:
    return _dotted(node).rpartition(".")[2]


def _texts(node: ast.expr) -> set[object]:
    values = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
    return {value.value if isinstance(value, ast.Constant) else None for value in values}


Lines: TypeAlias = Callable[[Path], tuple[set[int], set[int]] | None]


def covered_lines(record: Path) -> Lines:
    """Return a function that gives the statements and the executed lines of a file.

    ``record`` is what ``coverage json`` writes.
    """
    files = json.loads(record.read_text())["files"]
    known = {(ROOT / name).resolve(): found for name, found in files.items()}

    def lines_of(path: Path) -> tuple[set[int], set[int]] | None:
        found = known.get(path)
        if found is None:
            return None
        executed = set(found["executed_lines"])
        return executed | set(found["missing_lines"]), executed

    return lines_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines, or with ``--coverage`` how many ran and which did not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "src" / "torchmuster"])
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="JSON report of coverage")
    parser.add_argument("--files", action="store_true", help="print one line per file")
    options = parser.parse_args(arguments)
    covered = covered_lines(options.coverage) if options.coverage else None
    total = ran = parts = 0
    for path in sorted(_python_files(options.paths)):
        found = GpuLines()
        found.read(path.read_text(encoding="utf-8"), path.as_posix())
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
        lines = None if covered is None else covered(path)
        if covered is None:
            for first, last, rule in found.ranges():
                print(f"{name}:{first}-{last}  {rule}")
            continue
        statements, executed = lines or (set(found.rules), set())
        wanted = {line for line, rule in found.rules.items() if rule != "part"} & statements
        parts += sum(rule == "part" for rule in found.rules.values())
        total, ran = total + len(wanted), ran + len(wanted & executed)
        if options.files and wanted:
            print(f"{name}  {len(wanted & executed)} of {len(wanted)}")
        elif not options.files:
            for line in sorted(wanted - executed):
                print(f"{name}:{line}  {found.rules[line]}")
    if covered is not None:
        share = 100 * ran / total if total else 100
        print(
            f"{ran} of {total} lines executed ({share:.0f} %); {parts} lines of the rule part not counted"
        )
    return 0


def _python_files(paths: Sequence[Path]) -> set[Path]:
    found: set[Path] = set()
    for path in paths:
        found |= set(path.resolve().rglob("*.py")) if path.is_dir() else {path.resolve()}
    return found


if __name__ == "__main__":
    sys.exit(main())
