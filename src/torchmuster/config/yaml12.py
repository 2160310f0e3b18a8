"""Parse YAML 1.2 into plain values: ``1e-5`` is a number, ``no`` and ``2026-01-01`` are strings.

ruamel.yaml parses; this module keeps its nodes, because only they have a line and a column. It
is imported on use, so that commands that read no YAML start faster.
"""

from typing import TYPE_CHECKING, Any

from torchmuster.errors import first_line

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

_MOST_EVENTS = 10_000  # about one per value
_MOST_LEVELS = 20
_TAGS = "tag:yaml.org,2002:"


class Unreadable(Exception):
    """Text that is not YAML or exceeds the limits, with its position (``:3:5``) if known."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem)
        self.place = place


def compose(text: str) -> "Node | None":
    """Parse a document into nodes; None if it is empty. Raises :class:`Unreadable`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    try:
        _refuse_excess(text)
        root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except (YAMLError, ValueError, LookupError, OverflowError, AssertionError) as error:
        problem, place = first_line(error), ""
        if isinstance(error, MarkedYAMLError):
            problem = ", ".join(filter(None, (error.context, error.problem)))
            place = place_of(error.problem_mark or error.context_mark)
        elif isinstance(error, ReaderError):  # a character that YAML does not allow
            before = text[: error.position].split("\n")
            place = f":{len(before)}:{len(before[-1]) + 1}"
        raise Unreadable(f"is not YAML: {problem}", place) from error
    return root


def _refuse_excess(text: str) -> None:
    """Reject what is large or deep, tags (they name Python types) and aliases (they can be endless).

    The events are read one by one: ruamel.yaml takes seconds for 2,000 open brackets.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    level = 0
    for number, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
        if isinstance(event, CollectionStartEvent):
            level += 1
        elif isinstance(event, CollectionEndEvent):
            level -= 1
        problem, tag = None, getattr(event, "tag", None)
        if level > _MOST_LEVELS:
            problem = f"is nested too deeply: more than {_MOST_LEVELS} levels"
        elif number > _MOST_EVENTS:
            problem = f"is too large: more than {_MOST_EVENTS} values"
        elif isinstance(event, AliasEvent):
            problem = "has an alias (*name), which has no meaning here; quote a text with *"
        elif tag is not None:
            problem = f"the tag {tag.replace(_TAGS, '!!')} has no meaning here"
        if problem is not None:
            raise Unreadable(problem, place_of(event.start_mark))


def place_of(mark: Any) -> str:
    """Return the line and column of a mark, such as ``:3:5``."""
    return f":{mark.line + 1}:{mark.column + 1}"


def parse_value(text: str) -> object:
    """Parse one value; empty text stays a string. Raises :class:`Unreadable`."""
    node = compose(text)
    return text if node is None else value_of(node)


def value_of(node: "Node") -> object:
    """Convert a node to plain Python values."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    if isinstance(node, MappingNode):
        return {str(value_of(key)): value_of(value) for key, value in node.value}
    if isinstance(node, SequenceNode):
        return [value_of(item) for item in node.value]
    if (node.tag or "").removeprefix(_TAGS) not in {"int", "float", "bool", "null"}:
        return node.value  # a string; 2026-01-01 and = stay strings, too
    try:
        return YAML(typ="safe", pure=True).constructor.construct_object(node)
    except ValueError:  # more digits than Python converts
        return node.value
