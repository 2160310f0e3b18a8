"""Parse YAML 1.2 into plain values: ``1e-5`` is a number, ``no`` and ``2026-01-01`` are strings.

ruamel.yaml parses; this module keeps its nodes, because only they have a line and a column. It
is imported on use, so that commands that read no YAML start faster.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.nodes import Node

_MOST_VALUES = 10_000
_MOST_LEVELS = 20
_MOST_OPEN_BRACKETS = 200
_BRACKETS = re.compile(r"[\[\]{}]")
_TOO_DEEP = f"is nested too deeply: more than {_MOST_LEVELS} levels, including aliases"
_TAGS = "tag:yaml.org,2002:"
_PLAIN = {"map", "seq", "str", "int", "float", "bool", "null"}
_PLAIN |= {"timestamp", "merge", "value"}  # given to 2026-01-01, << and =, which stay strings


class Unreadable(ValueError):
    """Text that is not YAML or exceeds the limits, with its position (``:3:5``) if known."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(problem)
        self.place = "" if line is None else f":{line}:{column}"


def compose(text: str) -> "Node | None":
    """Parse a document into nodes; None if it is empty. Raises :class:`Unreadable`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    _refuse_open_brackets(text)
    parser = YAML(typ="safe", pure=True)
    parser.composer.warn_double_anchors = False  # YAML allows an anchor name to be reused
    try:
        root: Node | None = parser.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(_problem(error), mark.line + 1, mark.column + 1) from error
    except ReaderError as error:
        before = text[: error.position].split("\n")
        problem = f"is not YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        raise Unreadable(problem, len(before), len(before[-1]) + 1) from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    except (AssertionError, KeyError) as error:
        raise Unreadable("is not YAML 1.2: its %YAML line gives another version") from error
    except (ValueError, OverflowError) as error:
        raise Unreadable(r"is not YAML: a \U escape is not a valid character") from error
    except YAMLError as error:
        raise Unreadable(f"is not YAML: {error}") from error
    if root is not None:
        _refuse_excess(root)
    return root


def _refuse_open_brackets(text: str) -> None:
    """Refuse text with many open brackets: ruamel.yaml takes seconds for 2,000, in time that grows with their square.

    Brackets in strings and comments count as well, so the limit is far above that of levels.
    """
    level = 0
    for bracket in _BRACKETS.findall(text):
        level = level + 1 if bracket in "[{" else max(0, level - 1)
        if level > _MOST_OPEN_BRACKETS:
            raise Unreadable(_TOO_DEEP)


def parse_value(text: str) -> object:
    """Parse one value; empty text stays a string. Raises :class:`Unreadable`."""
    node = compose(text)
    return text if node is None else value_of(node)


def value_of(node: "Node") -> object:
    """Convert a node to plain Python values."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

    if isinstance(node, MappingNode):
        return {
            key.value: value_of(value) for key, value in node.value if isinstance(key, ScalarNode)
        }
    if isinstance(node, SequenceNode):
        return [value_of(item) for item in node.value]
    if (node.tag or "").removeprefix(_TAGS) not in {"int", "float", "bool", "null"}:
        return node.value
    try:
        return YAML(typ="safe", pure=True).constructor.construct_object(node)
    except (ValueError, LookupError):  # !!int abc, or more digits than Python converts
        return node.value


def _problem(error: "MarkedYAMLError") -> str:
    problem, begin, place = error.problem, error.context_mark, error.problem_mark
    if not problem or problem.startswith("but "):
        problem = ", ".join(part for part in (error.context, problem) if part)
    elif error.context and begin and place and begin.line != place.line:
        problem = f"{problem} ({error.context} that begins on line {begin.line + 1})"
    return f"is not YAML: {problem}"


def _refuse_excess(root: "Node") -> None:
    """Reject tags, which name Python types, and aliases that recurse or exceed the limits."""
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    waiting = [(root, 1)]
    values = 0
    while waiting:
        node, level = waiting.pop()
        values += 1
        problem, tag = "", node.tag or ""
        if tag.removeprefix(_TAGS) not in _PLAIN:
            problem = f"the tag {tag.replace(_TAGS, '!!')} has no meaning here"
        elif level > _MOST_LEVELS:
            problem = _TOO_DEEP
        elif values > _MOST_VALUES:
            problem = f"is too large: more than {_MOST_VALUES} values, including aliases"
        if problem:
            mark = node.start_mark
            raise Unreadable(problem, mark.line + 1, mark.column + 1)
        if isinstance(node, MappingNode):
            waiting += [(part, level + 1) for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            waiting += [(item, level + 1) for item in node.value]
