"""Stands in for ``muster run`` inside a job: tells what reaches it, and ends as it is told to.

It is started with SIGUSR1 blocked, so that one that comes early is told of as well.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def on_signal(number: int, frame: object) -> None:
    tell(signal=signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(143)


signal.signal(signal.SIGUSR1, on_signal)
signal.signal(signal.SIGTERM, on_signal)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
tell(words=sys.argv[1:], folder=str(Path.cwd()), restart=os.environ.get("SLURM_RESTART_COUNT"))
task, *values = sys.argv[1:]
if task == "wait":
    end = time.monotonic() + float(values[0])
    while time.monotonic() < end and not Path("enough").exists():
        time.sleep(0.1)
    tell(task="waited")
elif task == "variables":
    tell(variables={name: os.environ.get(name) for name in values})
elif task == "allocation":
    from torchmuster.launch.schedulers.slurm import allocation

    tell(allocation=repr(allocation.allocation_here(os.environ)))
elif task == "exit":
    sys.exit(int(values[0]))
