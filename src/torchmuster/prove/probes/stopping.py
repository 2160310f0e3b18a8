"""Stop the ranks of a trial at an exact place: kill them, send SIGTERM, or kill them in a save."""

import contextlib
import functools
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchmuster.prove.probes.isolation import before_safetensors
from torchmuster.prove.records import TrialRequest

_PATIENCE_S = 60.0


class Stopper:
    """Stops this rank, and others, as the request says."""

    def __init__(self, request: TrialRequest, rank: int) -> None:
        self._into, self._ranks, self._rank = Path(request.into), request.ranks, rank
        self._request = request.stop
        self._step = 0
        self._done = False
        (self._into / f"pid-{rank}").write_text(str(os.getpid()))
        if self._request is not None and self._request.how == "in-save":
            torch.save = self._tearing_torch(torch.save)
            before_safetensors(self._tear_safetensors)
            if request.with_run_folder:
                sys.addaudithook(self._in_own_save)

    def before_forward(self, steps_done: int, micro_batch: int) -> None:
        """Stop here, if this is the place."""
        self._step = steps_done
        stop = self._request
        if stop is None or self._done or stop.how == "in-save":
            return
        if (steps_done, micro_batch) != (stop.after_step, stop.in_micro_batch):
            return
        self._done = True
        self.wait_for_others("stop")
        if stop.how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif stop.how == "kill-all" or self._rank == self._ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, steps_done: int) -> None:
        """Take the number of steps that are done, for saves."""
        self._step = steps_done

    def wait_for_others(self, name: str) -> None:
        """Wait until all ranks are at the same place, or for a minute."""
        (self._into / f"{name}-{self._rank}").touch()
        end_s = time.monotonic() + _PATIENCE_S
        paths = [self._into / f"{name}-{rank}" for rank in range(self._ranks)]
        while time.monotonic() < end_s and not all(path.exists() for path in paths):
            time.sleep(0.005)

    @property
    def _now(self) -> bool:
        stop = self._request
        return stop is not None and stop.how == "in-save" and self._step >= stop.after_step

    def _kill_all(self) -> None:
        for rank in range(self._ranks):
            path = self._into / f"pid-{rank}"
            if rank != self._rank and path.exists():
                with contextlib.suppress(ProcessLookupError):  # it has exited
                    os.kill(int(path.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _tearing_torch(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def save(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
            if not self._now:
                return usual(obj, f, *arguments, **named)
            whole = io.BytesIO()
            usual(obj, whole, *arguments, **named)
            self._write_half(whole.getvalue(), f)
            self._kill_all()
            return None

        return save

    def _tear_safetensors(self, tensors: Any, path: Any) -> None:
        if self._now:
            from safetensors.torch import save

            self._write_half(save(tensors), path)
            self._kill_all()

    @staticmethod
    def _write_half(content: bytes, target: Any) -> None:
        half = content[: len(content) // 2]
        if isinstance(target, str | os.PathLike):
            Path(target).write_bytes(half)
        else:
            target.write(half)
            target.flush()

    def _in_own_save(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Kill the ranks of ``muster train`` when they open a file of a checkpoint."""
        if event == "open" and self._now:
            path, mode, flags = arguments
            writes = "w" in mode if mode else flags & os.O_WRONLY
            if (
                writes
                and isinstance(path, str | os.PathLike)
                and "/checkpoints/" in os.fspath(path)
            ):
                self._kill_all()
