"""The settings as JSON Schema, for editors that complete and check YAML while it is typed."""

from typing import Any

import msgspec

from torchmuster.config import fields
from torchmuster.config.settings import Settings


def json_schema() -> dict[str, Any]:
    """Return a self-contained JSON Schema (2020-12) of the settings file."""
    (reference,), components = msgspec.json.schema_components(
        [Settings], ref_template="#/$defs/{name}"
    )
    for one in components.values():
        one["additionalProperties"] = False  # an unknown key is an error, in the editor as well
    properties = components[Settings.__name__]["properties"]
    for name, group in fields.sections().items():
        properties[name] = {
            "description": components[group.__name__]["description"],
            "anyOf": [properties[name], {"type": "null"}],  # a section with nothing below it
        }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "torchmuster settings",
        **reference,
        "$defs": components,
    }
    plain: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(schema)
    )  # a default may be a tuple
    return plain
