"""Which keys of a document a model does not know.

The models of ``kubeflow_trainer_api`` accept unknown keys without a word, and so does the API server's
storage: a mistyped key would be ignored, not refused.
"""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel


def unknown_keys(document: object, model: type[BaseModel]) -> list[str]:
    """Return the path of every key that the model does not have: ``spec.template.sepc``."""
    return list(_walk(document, model, ""))


def _walk(value: object, kind: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        (inner,) = _parts(kind, list) or (Any,)
        for number, item in enumerate(value):
            yield from _walk(item, inner, f"{path}[{number}]")
    elif isinstance(value, dict):
        model = _model(kind)
        if model is None:
            _, inner = _parts(kind, dict) or (str, Any)
            for key, item in value.items():
                yield from _walk(item, inner, f"{path}.{key}")
            return
        known = {field.alias or name: field for name, field in model.model_fields.items()}
        for key, item in value.items():
            here = f"{path}.{key}".lstrip(".")
            if key in known:
                yield from _walk(item, known[key].annotation, here)
            else:
                yield here


def _model(kind: Any) -> type[BaseModel] | None:
    for option in [kind, *get_args(kind)]:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _parts(kind: Any, container: type) -> tuple[Any, ...]:
    """Return what a list or dictionary type holds, also inside Optional."""
    for option in [kind, *get_args(kind)]:
        if get_origin(option) is container:
            return get_args(option)
    return ()
