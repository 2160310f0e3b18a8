"""Run a cell in a rank: its last expression as text, its traceback reduced to the user's code."""

import ast
import io
import linecache
import pprint
import tokenize
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Also identifies frames of cells. Without a leading "<": hang reports show such file names.
CELL = "cell-"
_LONGEST_VALUE = 20_000
_LONGEST_TRACEBACK = 16_000
_WIDTH = 88
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """The result of a cell."""

    value: str = ""
    error: str = ""
    interrupted: bool = False


def run_cell(code: str, name: str, space: dict[str, Any]) -> CellOutcome:
    """Run a cell in the namespace of the earlier cells."""
    # So that tracebacks, inspect and hang reports find its lines.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        statements, last = _parsed(code, name)
        exec(compile(statements, name, "exec"), space)  # noqa: S102  # code of the notebook's user
        if last is None:
            return CellOutcome()
        value = eval(compile(last, name, "eval"), space)  # noqa: S307  # the same
        if value is None:
            return CellOutcome()
        space["_"] = value
        return CellOutcome(value=_cell_shown(value))
    except KeyboardInterrupt as error:
        return CellOutcome(error=_cell_message(error), interrupted=True)
    except BaseException as error:  # a cell must not stop its rank, not even with sys.exit
        return CellOutcome(error=_cell_message(error))


def _parsed(code: str, name: str) -> tuple[ast.Module, ast.Expression | None]:
    """Return the statements, and the last expression unless a semicolon hides it, as in IPython."""
    tree = ast.parse(code, name)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr) or _is_hidden(code):
        return tree, None
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    return tree, ast.Expression(last.value)


def _is_hidden(code: str) -> bool:
    """Return whether the last token of a cell, without comments, is a semicolon."""
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    code_tokens = [token for token in tokens if token.type not in _NO_CODE]
    return bool(code_tokens) and code_tokens[-1].string == ";"


def _cell_shown(value: object) -> str:
    plain = type(value) in (list, tuple, dict, set)
    text = pprint.pformat(value, width=_WIDTH, sort_dicts=False) if plain else repr(value)
    more = len(text) - _LONGEST_VALUE
    return text if more <= 0 else f"{text[:_LONGEST_VALUE]}… {more:,} more characters"


def _cell_message(error: BaseException) -> str:
    """Return the traceback: the lines of cells, and the innermost line."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    seen: set[int] = set()
    part: traceback.TracebackException | None = told
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        part.stack = _shortened(part.stack)
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()[-_LONGEST_TRACEBACK:]


def _is_ours(file: str) -> bool:
    """Return whether a file belongs to the code that runs or interrupts cells."""
    return Path(file).parent == Path(__file__).parent


def _shortened(stack: traceback.StackSummary) -> traceback.StackSummary:
    last = len(stack) - 1
    kept = [
        frame
        for place, frame in enumerate(stack)
        if frame.filename.startswith(CELL) or (place == last and not _is_ours(frame.filename))
    ]
    return traceback.StackSummary.from_list(kept)
