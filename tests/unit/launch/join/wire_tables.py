"""The tables of docs/dev/wire-protocol.md, made from the messages themselves.

Run as a program it writes them into the page.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.launch import protocol
from torchmuster.launch.transports.join import messages as handshake

PAGE = Path(__file__).resolve().parents[4] / "docs" / "dev" / "wire-protocol.md"

SECTIONS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "handshake": (handshake.Join, handshake.Welcome, handshake.Refused),
    "to a node agent": typing.get_args(typing.get_args(protocol.ToAgent)[0]),
    "from a node agent": typing.get_args(typing.get_args(protocol.FromAgent)[0]),
}
NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", bytes: "base64"}


def type_name(kind: Any) -> str:
    """Name a type as it is in JSON."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"object of {type_name(arguments[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if one is type(None) else type_name(one) for one in arguments)
    return NAMES.get(kind) or kind.__name__


def fields(message: type[msgspec.Struct]) -> str:
    """Name the fields of a message; those that may be left out have a question mark."""
    return ", ".join(
        f"`{field.encode_name}`{'' if field.required else '?'} {type_name(field.type)}"
        for field in msgspec.structs.fields(message)
    )


def meaning(message: type[msgspec.Struct]) -> str:
    return " ".join((inspect.getdoc(message) or "").split("\n\n")[0].split())


def parts(messages: Iterable[type[msgspec.Struct]]) -> dict[str, type[msgspec.Struct]]:
    """Return the records inside messages, by name, in the order they are met."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found.setdefault(kind.__name__, kind)
            for field in msgspec.structs.fields(kind):
                visit(field.type)
        for inner in typing.get_args(kind):
            visit(inner)

    for message in messages:
        for field in msgspec.structs.fields(message):
            visit(field.type)
    return found


def tables() -> dict[str, str]:
    """Return every generated part of the page by its name."""
    made = {}
    for section, messages in SECTIONS.items():
        rows = ["| kind | meaning | fields |", "|---|---|---|"]
        for message in messages:
            tag = message.__struct_config__.tag
            rows.append(f"| `{tag}` | {meaning(message)} | {fields(message)} |")
        made[section] = "\n".join(rows)
    inner = parts(message for messages in SECTIONS.values() for message in messages)
    rows = ["| record | meaning | fields |", "|---|---|---|"]
    rows += [f"| {name} | {meaning(one)} | {fields(one)} |" for name, one in inner.items()]
    made["records"] = "\n".join(rows)
    return made


def in_page(text: str) -> dict[str, str]:
    """Return the generated parts as they stand in the page."""
    return dict(re.findall(r"<!-- table: ([\w ]+) -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, made in tables().items():
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{mark}{made}\n\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8")
