"""Stop the ranks of a trial at an exact place: kill them, send SIGTERM, or kill them in ``torch.save``."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from torchmuster.prove.probes.replacing import replace
from torchmuster.prove.records import TrialRequest

_PATIENCE_S = 60.0


class Stopper:
    """Stops this rank, and others, as the request says; ``steps_done`` is kept up to date by the recorder."""

    def __init__(self, request: TrialRequest, rank: int) -> None:
        self.steps_done = 0
        self._into, self._rank = Path(request.into), rank
        self._ranks = range(request.ranks)
        self._stop = request.stop
        (self._into / f"pid-{rank}").write_text(str(os.getpid()))
        if self._stop is not None and self._stop.name == "save-killed":
            replace(torch, "save", self._tear, when=self._is_due)

    def before_forward(self, micro_batch: int) -> None:
        """Stop here, if this is the place."""
        stop = self._stop
        if stop is None or stop.name == "save-killed":
            return
        if (self.steps_done, micro_batch) != (stop.after_step, stop.in_micro_batch):
            return
        self._stop = None
        self.wait_for_others("stop")
        if stop.name == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        elif stop.name == "killed" or self._rank == self._ranks[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_others(self, name: str) -> None:
        """Wait until all ranks are at the same place, or for a minute."""
        (self._into / f"{name}-{self._rank}").touch()
        end_s = time.monotonic() + _PATIENCE_S
        paths = [self._into / f"{name}-{rank}" for rank in self._ranks]
        while time.monotonic() < end_s and not all(path.exists() for path in paths):
            time.sleep(0.005)

    # ---- in a save

    def _is_due(self) -> bool:
        return self._stop is not None and self.steps_done >= self._stop.after_step

    def _tear(self, usual: Any, obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        """Write the first half of a file, and kill all ranks."""
        whole = io.BytesIO()
        usual(obj, whole, *arguments, **named)
        half = whole.getvalue()[: whole.tell() // 2]
        if isinstance(f, str | os.PathLike):
            Path(f).write_bytes(half)
        else:
            f.write(half)
            f.flush()
        self._kill_all()

    def _kill_all(self) -> None:
        for rank in self._ranks:
            path = self._into / f"pid-{rank}"
            if rank != self._rank and path.exists():
                with contextlib.suppress(ProcessLookupError):  # it has exited
                    os.kill(int(path.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
