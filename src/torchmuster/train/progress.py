"""Where a training is: which step, in which phase of it. Told by ``Trainer``, read by whoever watches the process.

Attributes that are only written, so that telling costs nothing::

    progress.step, progress.phase = 120, "loading data"
"""


class Progress:
    """The step that is being done, counted from 1, and its phase; None and "" while nothing is trained.

    The shares are of this rank's time between the last two lines: how much it waited for data, and for communication
    that no computing hid. None where that is not measured.
    """

    __slots__ = ("communication_share", "data_share", "phase", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = ""
        self.data_share: float | None = None
        self.communication_share: float | None = None


progress = Progress()
