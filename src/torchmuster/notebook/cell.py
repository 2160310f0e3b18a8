"""Running a cell in a rank: its last expression as text, its traceback without what is not the user's."""

import ast
import linecache
import pprint
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.launch.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class RanksRequest:
    """Ranks as for ``muster run``, or with guests as for ``muster host``; the command is added later."""

    spec: JobSpec
    guests: int = 0

    @property
    def many(self) -> bool:
        """Whether ranks are on other machines as well."""
        return bool(self.guests or self.spec.hosts)


# Also what tells a frame of a cell from others. No "<" in front: hangs name a rank's place by such files.
CELL = "cell-"
_LONGEST_VALUE = 20_000
_LONGEST_TRACEBACK = 16_000
_WIDTH = 88


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """What a cell came to."""

    value: str = ""
    error: str = ""
    interrupted: bool = False


def run_cell(code: str, name: str, space: dict[str, Any]) -> CellOutcome:
    """Run a cell among the names of earlier ones."""
    # So that tracebacks, inspect and the names of hangs find its lines.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        statements, last = _parsed(code, name)
        exec(compile(statements, name, "exec"), space)  # noqa: S102  # what the notebook's user typed
        if last is None:
            return CellOutcome()
        value = eval(compile(last, name, "eval"), space)  # noqa: S307  # the same
        if value is None:
            return CellOutcome()
        space["_"] = value
        return CellOutcome(value=_cell_shown(value))
    except KeyboardInterrupt as error:
        return CellOutcome(error=_cell_message(error), interrupted=True)
    except BaseException as error:  # a cell must not end its rank, not even by sys.exit
        return CellOutcome(error=_cell_message(error))


def _parsed(code: str, name: str) -> tuple[ast.Module, ast.Expression | None]:
    """Return the statements, and the last expression unless a semicolon hides it, as in IPython."""
    tree = ast.parse(code, name)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr) or code.rstrip().endswith(";"):
        return tree, None
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    return tree, ast.Expression(last.value)


def _cell_shown(value: object) -> str:
    plain = type(value) in (list, tuple, dict, set)
    text = pprint.pformat(value, width=_WIDTH, sort_dicts=False) if plain else repr(value)
    more = len(text) - _LONGEST_VALUE
    return text if more <= 0 else f"{text[:_LONGEST_VALUE]}… {more:,} characters more"


def _cell_message(error: BaseException) -> str:
    """Return the traceback: the lines of cells, and the innermost one wherever it is."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    seen: set[int] = set()
    part: traceback.TracebackException | None = told
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        part.stack = _shortened(part.stack)
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()[-_LONGEST_TRACEBACK:]


def _is_ours(file: str) -> bool:
    """Say whether a file is what runs cells: also the handler that interrupts them."""
    return Path(file).parent == Path(__file__).parent


def _shortened(stack: traceback.StackSummary) -> traceback.StackSummary:
    last = len(stack) - 1
    kept = [
        frame
        for place, frame in enumerate(stack)
        if frame.filename.startswith(CELL) or (place == last and not _is_ours(frame.filename))
    ]
    return traceback.StackSummary.from_list(kept)
