"""Ctrl-C, or the notebook's button, collected instead of raised."""

import contextlib
import signal
from collections.abc import Iterator


class Interrupts:
    """How often an interrupt was asked for."""

    count = 0

    def take_note(self, *_: object) -> None:
        """Count one: the handler of the signal."""
        self.count += 1


@contextlib.contextmanager
def collected() -> Iterator[Interrupts]:
    """Collect interrupts meanwhile: an exception in any line could leave ranks half asked."""
    asked = Interrupts()
    try:
        before = signal.signal(signal.SIGINT, asked.take_note)
    except ValueError:  # a cell in another thread than the main one, which hears no signals
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
