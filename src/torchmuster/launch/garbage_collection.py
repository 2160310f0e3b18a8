"""Python's garbage collector in processes that have imported torch."""

import atexit
import gc
import sys


def freeze_objects() -> None:
    """Exclude everything that exists now from garbage collection.

    Python collects once more at exit, which takes about a third as long as importing torch did.
    """
    gc.freeze()
    atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    # Triton's objects are bound by nanobind, which prints every one that is still there after Python's exit.
    if "triton" in sys.modules:
        gc.unfreeze()
