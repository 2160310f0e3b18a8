"""The process that launches a notebook's ranks: ``muster run``."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from torchmuster.notebook.messages import SECRET_VARIABLE

_END_WITHIN_S = 20.0
_GRACE = "launch.grace=2s"
_PR_SET_PDEATHSIG = 1


class Launcher:
    """``muster run`` with these flags; ``on_text`` gets its lines in a thread, and None when it has exited.

    It gets SIGTERM when the kernel exits for any reason.
    """

    def __init__(
        self,
        flags: Sequence[str],
        address: str,
        secret: bytes,
        on_text: Callable[[str | None], None],
    ) -> None:
        self._on_text = on_text
        # The ranks run on this host, also in a Slurm job with several nodes.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
        }
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torchmuster", "run", "--name", "notebook", *flags),
                *("--set", _GRACE, "--env", SECRET_VARIABLE),
                *("-m", "torchmuster.notebook.rank_loop", address),
            ],
            env={**environment, SECRET_VARIABLE: secret.hex()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Jupyter interrupts and kills a kernel's whole process group.
            start_new_session=True,
            preexec_fn=functools.partial(  # one system call
                ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM
            ),
        )
        self._thread = threading.Thread(target=self._read, name="notebook-launcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def end(self) -> None:
        """Make it stop all ranks, and wait until it exits."""
        self._process.terminate()
        self._process.terminate()  # the second request kills the ranks
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            # The node agent stops the ranks when nothing comes from it any more.
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_WITHIN_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._on_text(line)
        self._process.wait()  # leave no zombie in the kernel
        self._on_text(None)
