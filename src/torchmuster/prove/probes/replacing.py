"""Put a function in front of one of torch's, as the hooks of a trial do."""

import functools
from collections.abc import Callable
from typing import Any


def replace(
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    *,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Call ``replacement(usual, …)`` instead of ``owner.name``, ``when`` that holds.

    ``owner`` is a module, or a class whose method is replaced for all of its objects.
    """
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def call(*arguments: Any, **named: Any) -> Any:
        if when():
            return replacement(usual, *arguments, **named)
        return usual(*arguments, **named)

    setattr(owner, name, call)
