"""A real Jupyter kernel in a process of its own: cells run in it, interrupted, killed."""

import contextlib
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from patience import GIVE_UP_S
from ranks.launched import MARK, living


@dataclass
class Executed:
    """What a cell showed: ``text`` as it was written, ``shown`` by places that are written anew."""

    text: str = ""
    shown: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)  # of those places, one after the other
    error: str = ""


class Kernel:
    """A kernel, asked as a front end asks it."""

    def __init__(self, folder: Path) -> None:
        self.mark = os.urandom(8).hex()
        self._manager = KernelManager(kernel_name="python3")
        env = {
            **os.environ,
            MARK: self.mark,
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        }
        self._manager.start_kernel(cwd=str(folder), env=env)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=GIVE_UP_S)
        self._asked = ""
        self._so_far = Executed()

    @property
    def process(self) -> psutil.Process:
        """The kernel's own process."""
        pid: int = self._manager.provisioner.pid  # type: ignore[union-attr]
        return psutil.Process(pid)

    def begin(self, code: str) -> None:
        """Begin to run a cell."""
        self._asked = self._client.execute(code)
        self._so_far = Executed()

    def wait_for(self, text: str, within_s: float = GIVE_UP_S) -> Executed:
        """Wait until a cell that was begun has shown a text."""
        return self._listen(
            lambda so_far: text in so_far.text or any(text in one for one in so_far.states),
            within_s,
        )

    def finish(self, within_s: float = GIVE_UP_S) -> Executed:
        """Wait for the end of the cell that was begun."""
        return self._listen(lambda _: False, within_s)

    def run(self, code: str) -> Executed:
        """Run a cell to its end."""
        self.begin(code)
        return self.finish()

    def run_well(self, code: str) -> str:
        """Run a cell that must not fail; return what it wrote."""
        done = self.run(code)
        assert not done.error, done
        return done.text

    def interrupt(self) -> None:
        """Do what the button does."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """Kill the kernel as the system would: it hears nothing of it."""
        self.process.kill()

    def close(self) -> None:
        """End the kernel, and what a failed test left."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        for process in living(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _listen(self, enough: Any, within_s: float) -> Executed:
        deadline = time.monotonic() + within_s
        so_far = self._so_far
        while not enough(so_far):
            try:
                message = self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not within {within_s} s: {so_far}") from None
            if message["parent_header"].get("msg_id") == self._asked and _is_last(so_far, message):
                break
        return so_far


def _is_last(so_far: Executed, message: dict[str, Any]) -> bool:
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            so_far.text += content["text"]
        case "display_data" | "update_display_data":
            text = content["data"]["text/plain"]
            so_far.shown[content["transient"]["display_id"]] = text
            so_far.states.append(text)
        case "error":
            so_far.error = "\n".join(content["traceback"])
        case "status":
            return bool(content["execution_state"] == "idle")
    return False


@contextlib.contextmanager
def running_kernel(folder: Path) -> Iterator[Kernel]:
    """Give a kernel that works in this folder; at the end nothing of it may be left."""
    kernel = Kernel(folder)
    try:
        yield kernel
    finally:
        kernel.close()
