"""Where a training is: which step, in which phase of it. Told by ``Trainer``, read by whoever watches the process.

Two attributes that are only written, so that telling costs nothing::

    progress.step, progress.phase = 120, "loading data"
"""


class Progress:
    """The step that is being done, counted from 1, and its phase; None and "" while nothing is trained."""

    __slots__ = ("phase", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = ""


progress = Progress()
