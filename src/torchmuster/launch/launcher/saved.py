"""Ranks that saved their work because they were asked to end, and ended with exit code 75."""

import signal
from collections.abc import Sequence

from torchmuster.errors import ExitCode
from torchmuster.launch import protocol
from torchmuster.launch.history import known_failures
from torchmuster.launch.launcher.node_handle import Node

# A rank that saved is on its way out when it is told once more to end, with whoever is still there.
_ENDED = (0, -2, -9, -15)
_WARNED = -getattr(signal, "SIGUSR1", 10)
NOTHING_NEW = "ended at a request, with nothing new to save"


def words(nodes: Sequence[Node], *, warned: bool = False) -> str:
    """Return what the ranks said of it; "" where a machine has none that saved, or one that failed.

    If they can save and were ``warned``, those that the warning ended had not begun, or were done.
    """
    asked = (int(ExitCode.SAVED), *((_WARNED,) if warned else ()))
    ends = [node.ended for node in nodes if node.ended is not None]
    if not ends or len(ends) < len(nodes):
        return ""
    if not all(any(_code(one) in asked for one in ended.failures) for ended in ends):
        return ""
    failures = [failure for ended in ends for failure in ended.failures]
    if any(_code(failure) not in (*asked, *_ENDED) for failure in failures):
        return ""
    told = [one.what for one in failures if one.exit_code == ExitCode.SAVED]
    return next(filter(None, told), "saved at a request to end" if told else NOTHING_NEW)


def _code(failure: protocol.Failure) -> int:
    return known_failures.by_signal(failure.exit_code)
