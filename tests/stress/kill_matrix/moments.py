"""Files by which a training and whoever strikes it understand each other: where to wait, and who has begun."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Not `patience`'s: that imports pytest, a second of every rank's start.
GIVE_UP_S = 240.0


@dataclass(frozen=True)
class Moments:
    """What lies in a training's folder."""

    folder: Path

    @property
    def hold(self) -> Path:
        """``<moment> <rank>``: who is to wait, and where, for as long as the file is there."""
        return self.folder / "hold"

    @property
    def held(self) -> Path:
        """Is there once that rank waits."""
        return self.folder / "held"

    @property
    def begun(self) -> Path:
        """Holds a file ``<rank>.<pid>`` for every process that has begun to train."""
        return self.folder / "begun"

    @property
    def hurry(self) -> Path:
        """Is there once no kill is to come any more."""
        return self.folder / "hurry"

    def await_kill(self) -> None:
        """Wait here until a kill is about to come, or none any more."""
        until_s = time.monotonic() + GIVE_UP_S
        while not (self.hold.exists() or self.hurry.exists()) and time.monotonic() < until_s:
            time.sleep(0.001)

    def hold_at(self, moment: str) -> None:
        """Wait here if that is asked of this rank."""
        try:
            if self.hold.read_text() != f"{moment} {os.environ['RANK']}":
                return
        except FileNotFoundError:
            return
        self.held.touch()
        until_s = time.monotonic() + GIVE_UP_S
        while self.hold.exists() and time.monotonic() < until_s:
            time.sleep(0.001)
