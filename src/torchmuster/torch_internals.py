"""Private names of torch: what each is for, on which versions it was run, and what happens without it.

A package that needs such names has all of them in one file, ``torch_private.py``, with a table ``NAMES``. No other file uses
one (``tests/architecture/test_torch_private.py``).
"""

import importlib
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass

from torchmuster.errors import Impossible

# The versions of torch on which the tests of what uses these names were run.
RUN_ON = ("2.12.0", "2.13.0", "2.14.1", "2.15.0")


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch, or a private attribute of one of its objects."""

    name: str
    use: str
    without: str = ""  # what happens where torch does not have it; "": an error
    run_on: tuple[str, ...] = RUN_ON


def require(names: Iterable[PrivateName]) -> None:
    """Raise if the installed torch lacks a name that cannot be done without."""
    missing = [private for private in names if not private.without and not exists(private.name)]
    if missing:
        raise Impossible(
            f"torch {importlib.metadata.version('torch')} does not have "
            + ", ".join(private.name for private in missing),
            why="torchmuster needs "
            + "; ".join(f"{private.name} to {private.use}" for private in missing)
            + ". A version of torch may change private names",
            fix=f"install a version of torch that was tested: pip install 'torch>={RUN_ON[0]},<={RUN_ON[-1]}'",
        )


def exists(name: str) -> bool:
    """Say whether torch has a name: a module, something in one, or an attribute of something in one."""
    path, *parts = name.split(".")
    found: object = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif part in getattr(found, "__annotations__", {}):
            return True  # an attribute of instances
        else:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True
