"""Training progress: the current step and its phase. Written by ``Trainer``, read by monitors.

``Trainer`` only sets attributes, so reporting costs nothing::

    progress.step, progress.phase = 120, "loading data"
"""


class Progress:
    """The current step, counted from 1, and its phase; None and "" outside of training.

    The shares are fractions of this rank's time between the last two step lines: waiting for data,
    and for communication that did not overlap with compute. None if not measured.
    """

    __slots__ = ("communication_share", "data_share", "phase", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = ""
        self.data_share: float | None = None
        self.communication_share: float | None = None


progress = Progress()
