"""Call functions before and after a method of a library, without a change to the script that uses it."""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchmuster.integrations import recorder as recording


@dataclass
class Call:
    """One call of a wrapped function: its arguments by name, and after it the result and the time it took."""

    arguments: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    seconds: float = 0.0


def wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[Call], None] | None = None,
    after: Callable[[Call], None] | None = None,
    saves: bool = False,
) -> None:
    """Replace ``owner.name`` by a function that calls it and these two; for a method, ``self`` is an argument too.

    ``saves``: it writes a checkpoint that is recorded as a whole, not file by file. Errors of ``before`` and ``after`` never reach
    the script.
    """
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*positional: Any, **named: Any) -> Any:
        call = Call(arguments=dict(named))
        with contextlib.suppress(TypeError):
            call.arguments = dict(signature.bind(*positional, **named).arguments)
        if before is not None:
            with contextlib.suppress(Exception):
                before(call)
        recorder = recording.recorder
        whole = recorder.library_saves() if saves and recorder else contextlib.nullcontext()
        began_s = time.perf_counter()
        with whole:
            call.result = original(*positional, **named)
        call.seconds = time.perf_counter() - began_s
        if after is not None:
            with contextlib.suppress(Exception):
                after(call)
        return call.result

    setattr(owner, name, wrapped)
