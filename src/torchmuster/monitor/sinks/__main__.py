"""The sidecar process of rank 0 that sends the metrics: ``python -m torchmuster.monitor.sinks``.

It reads its configuration as one line from stdin, then waits until the rank closes the pipe or
dies. A slow or failing tracker affects only this process, not the training.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible, NotNow
from torchmuster.monitor.sinks.sending import Sending
from torchmuster.monitor.sinks.sent import sent_lock
from torchmuster.monitor.sinks.sidecar import FINISH_WITHIN_S, FINISHED, Order
from torchmuster.monitor.sinks.sink import Wanted, open_sink
from torchmuster.runfolder import RunFolder

_NICE = 10
_LOOK_AGAIN_S = 0.5


def main() -> None:
    """Send to all sinks in parallel until the training ends."""
    os.nice(_NICE)  # the training comes first
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    run = RunFolder(Path(order.run))
    ended = threading.Event()
    finished = threading.Event()
    begun: dict[str, Sending] = {}
    threads = {
        name: threading.Thread(
            target=_send, args=(run, name, order.wanted, begun, ended, finished), daemon=True
        )
        for name in order.wanted.sinks
    }
    for thread in threads.values():
        thread.start()
    for line in sys.stdin.buffer:
        if line.strip() == FINISHED:
            finished.set()
    ended.set()
    until_s = time.monotonic() + FINISH_WITHIN_S
    for name, thread in threads.items():
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive() and name in begun:
            begun[name].break_off(FINISH_WITHIN_S)
    # Exit without waiting for tracker libraries: the run folder has all metrics.
    os._exit(0)


def _send(
    run: RunFolder,
    name: str,
    wanted: Wanted,
    begun: dict[str, Sending],
    ended: threading.Event,
    finished: threading.Event,
) -> None:
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(sent_lock(run, name))
                break
            except NotNow:  # the process of the previous attempt is still running
                if ended.wait(_LOOK_AGAIN_S):
                    return
            except Impossible as error:
                print(error, file=sys.stderr, flush=True)
                return
        sending = Sending(run, name, lambda known: open_sink(name, run, wanted, known))
        begun[name] = sending
        sending.follow(ended)
        sending.close(finished=finished.is_set())


if __name__ == "__main__":
    main()
