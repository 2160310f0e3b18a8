"""Run a cell in a rank: its last expression as text, its traceback reduced to the user's code."""

import ast
import io
import linecache
import pprint
import tokenize
import traceback
from pathlib import Path
from typing import Any

from torchmuster.notebook.messages import Done, Run

# Also identifies frames of cells. Without a leading "<": hang reports show such file names.
CELL = "cell-"
_LONGEST_VALUE = 20_000
_LONGEST_TRACEBACK = 16_000
_WIDTH = 88
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)


def run_cell(request: Run, space: dict[str, Any]) -> Done:
    """Run a cell in the namespace of the earlier cells."""
    code, name = request.code, request.name
    done = Done(request=request.request)
    # So that tracebacks, inspect and hang reports find its lines.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        statements, last = _parsed(code, name)
        exec(compile(statements, name, "exec"), space)  # noqa: S102  # code of the notebook's user
        if last is not None:
            value = eval(compile(last, name, "eval"), space)  # noqa: S307  # the same
            if value is not None:
                space["_"] = value
                done.value = _text_of(value)
    except BaseException as error:  # a cell must not stop its rank, not even with sys.exit
        done.error = _message(error)
        done.interrupted = isinstance(error, KeyboardInterrupt)
    return done


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


def _text_of(value: object) -> str:
    text = repr(value)
    if type(value) in (list, tuple, dict, set):
        text = pprint.pformat(value, width=_WIDTH, sort_dicts=False)
    more = len(text) - _LONGEST_VALUE
    if more > 0:
        return f"{text[:_LONGEST_VALUE]}… {more:,} more characters"
    return text


def _message(error: BaseException) -> str:
    """Return the traceback: the lines of cells, and the innermost line."""
    report = traceback.TracebackException.from_exception(error, compact=True)
    part: traceback.TracebackException | None = report
    while part is not None:
        part.stack = _shortened(part.stack)
        part = part.__cause__ or part.__context__
    return "".join(report.format()).rstrip()[-_LONGEST_TRACEBACK:]


def _shortened(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Keep the frames of cells, and the innermost one unless it runs or interrupts cells."""
    frames = [frame for frame in stack if frame.filename.startswith(CELL)]
    if stack and stack[-1] not in frames:
        innermost = stack[-1]
        if Path(innermost.filename).parent != Path(__file__).parent:
            frames.append(innermost)
    return traceback.StackSummary.from_list(frames)
